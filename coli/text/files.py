"""Reading the small text files of a model folder: JSON and templates that were downloaded and are not trusted.

Sizes are capped before reading and every shape is checked; whatever is wrong raises TokenizerError in one line that
names the file and the field. A missing file is None: most of them are optional.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coli.errors import TokenizerError
from coli.impostors import impostor, open_regular

JSON_CAP = 16 * 2**20  # bytes; the largest tokenizer_config.json in the wild is about 3 MB


def read_text(path: Path, cap: int) -> str | None:
    """UTF-8 text of a file of at most `cap` bytes; None when there is no such file."""
    try:
        with open_regular(path) as file:
            data = file.read(cap + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > cap:
        raise TokenizerError(f"{path}: larger than {cap} bytes, which no such file needs; download it again")
    found = impostor(data[:128])
    if found is not None:
        raise TokenizerError(f"{path}: {found}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: not UTF-8 text (byte {error.start}); download it again") from None


def read_json_object(path: Path, cap: int = JSON_CAP) -> dict[str, Any] | None:
    """The JSON object in a file; None when there is no such file."""
    text = read_text(path, cap)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise TokenizerError(
            f"{path}:{error.lineno}: not JSON ({error.msg}); the file may be cut short, download it again"
        ) from None
    except (RecursionError, ValueError) as error:
        raise TokenizerError(f"{path}: not usable JSON ({error})") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object, found {type_name(value)}")
    return value


def type_name(value: object) -> str:
    """JSON's word for the type of a parsed value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", type(None): "null"}
    return names.get(type(value), "a number")


def named_tokens(settings: dict[str, Any], path: Path) -> dict[str, str]:
    """bos_token, eos_token, ... -> text, of a parsed tokenizer_config.json; each may be text, null or {"content"}."""
    named = {}
    for field in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = settings.get(field)
        if isinstance(value, dict):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise TokenizerError(f"{path}: {field}: expected text or an object with content, found {type_name(value)}")
        if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
            raise TokenizerError(
                f"{path}: {field}: expected Unicode text, found half of a surrogate pair in {value!r:.60}"
            )
        named[field] = value
    return named
