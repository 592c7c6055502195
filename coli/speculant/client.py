"""A client of `coli serve` that needs nothing but the standard library."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from coli.errors import ColiError

T = TypeVar("T")


class ServerError(ColiError):
    """The server refused a request or cannot be reached; `status` is None for the latter."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Health:
    """Answer of GET /health."""

    status: str
    model_name: str
    model_loaded: bool
    graph_loaded: bool
    graph_path: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of POST /generate."""

    text: str
    generated_tokens: int
    prompt_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float
    generation_time: float
    finish_reason: str
    seed: int


class Client:
    """Talks to one server. The model stays loaded between requests."""

    def __init__(
        self, base_url: str = "http://127.0.0.1:8000", api_key: str | None = None, timeout: float | None = None
    ) -> None:
        """timeout: seconds without a byte before giving up; None: never."""
        self._base_url, self._api_key, self._timeout = base_url.rstrip("/"), api_key, timeout

    def health(self) -> Health:
        """What is served. Raises ServerError."""
        return _picked(Health, self._call("/health"))

    def generate(
        self, prompt: str, max_tokens: int = 100, temperature: float | None = None, seed: int | None = None
    ) -> Answer:
        """Answer `prompt`. Raises ServerError."""
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        return _picked(Answer, self._call("/generate", body))

    def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base_url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                found = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise ServerError(f"{path}: {_message(error.read()) or error.reason}", error.code) from None
        except (OSError, ValueError) as error:
            raise ServerError(f"{self._base_url}{path}: {getattr(error, 'reason', None) or error}") from None
        assert isinstance(found, dict)
        return found


def _picked(kind: type[T], found: dict[str, Any]) -> T:
    return kind(**{field.name: found.get(field.name) for field in fields(kind)})  # type: ignore[arg-type]


def _message(data: bytes) -> str | None:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
