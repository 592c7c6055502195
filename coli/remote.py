"""A conversation with a running server: the messages are kept here, the rows there. Needs the standard library only."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from coli.errors import ColiError, OptionError
from coli.options import GenerateOptions

_FIELDS = {"temp": "temperature"}
_END = "data: [DONE]"


class RemoteError(ColiError):
    """The server refused or cannot be reached."""


class RemoteConversation:
    """Asks `URL/v1/chat/completions`; settings nobody gave are left to the server."""

    def __init__(
        self, url: str, api_key: str | None, given: Collection[str], fields: Mapping[str, Any] | None = None
    ) -> None:
        """given: names of the settings somebody gave; fields: more of every request.

        Raises OptionError for what is no address of a server.
        """
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise OptionError(f"--attach {url}: expected http://HOST:PORT, the address `coli serve` says it listens on")
        self.messages: list[dict[str, str]] = []
        self.system: str | None = None
        self.result: Any = None
        self._url, self._api_key = url.rstrip("/").removesuffix("/v1"), api_key
        self._fields = dict(fields or {})
        self._given = set(given)
        self._first: GenerateOptions | None = None

    def ask(self, text: str, options: GenerateOptions) -> Iterator[str]:
        """Say `text` and stream the answer. Raises RemoteError."""
        self.messages.append({"role": "user", "content": text})
        return self._answer(options)

    def retry(self, options: GenerateOptions) -> Iterator[str]:
        """Answer the last message again, with another seed."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise OptionError("/retry: nothing was said yet")
        return self._answer(replace(options, sampler=replace(options.sampler, seed=None)))

    def reset(self) -> None:
        """Forget what was said."""
        self.messages = []

    def save(self, path: Path) -> None:
        raise OptionError("/save: the rows are the server's; save is for conversations in this process")

    def load(self, path: Path) -> None:
        raise OptionError("/load: the rows are the server's; load is for conversations in this process")

    def _body(self, options: GenerateOptions) -> dict[str, Any]:
        self._first = self._first or options
        sampler, first = options.sampler, self._first.sampler
        names = ("temp", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty", "seed")
        body: dict[str, Any] = {"stream": True, **self._fields}
        if "ngen" in self._given or options.max_tokens != self._first.max_tokens:
            body["max_tokens"] = options.max_tokens
        if options.ignore_eos:
            body["ignore_eos"] = True
        for name in names:
            field = _FIELDS.get(name, name)
            value = getattr(sampler, field)
            if value is not None and (name in self._given or value != getattr(first, field)):
                body[field] = value
        if options.stop:
            body["stop"] = list(options.stop)
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {**body, "messages": [*system, *self.messages]}

    def _answer(self, options: GenerateOptions) -> Iterator[str]:
        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        data = json.dumps(self._body(options)).encode()
        said = {"role": "assistant", "content": ""}
        try:
            request = urllib.request.Request(f"{self._url}/v1/chat/completions", data, headers)
            with closing(urllib.request.urlopen(request)) as response:
                self.messages.append(said)
                ended = False
                for line in response:
                    ended = ended or line.decode("utf-8", "replace").strip() == _END
                    piece = _piece(line)
                    if piece:
                        said["content"] += piece
                        yield piece
                if not ended:
                    raise ValueError("the answer broke off; say it again")
        except urllib.error.HTTPError as error:
            self.messages.pop()
            with error:
                raise RemoteError(f"{self._url}: {_message(error.read()) or error.reason}") from None
        except (OSError, ValueError, HTTPException, RemoteError) as error:
            if self.messages[-1] is said:
                self.messages.pop()
            self.messages.pop()
            if isinstance(error, HTTPException):
                error = ValueError(f"no answer of a server of coli's kind, or it broke off ({type(error).__name__})")
            raise RemoteError(f"{self._url}: {getattr(error, 'reason', None) or error}") from None


def _piece(line: bytes) -> str:
    """The text in one line of a stream. Raises RemoteError for an error sent in it."""
    text = line.decode("utf-8", "replace").strip()
    if not text.startswith("data: ") or text == _END:
        return ""
    body = json.loads(text.removeprefix("data: "))
    try:
        if "error" in body:
            raise RemoteError(str(body["error"].get("message")))
        choices = body.get("choices") or [{}]
        return str(choices[0].get("delta", {}).get("content") or "")
    except (AttributeError, TypeError, KeyError, IndexError):
        raise ValueError("expected the events of a chat completion") from None


def _message(data: bytes) -> str | None:
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
