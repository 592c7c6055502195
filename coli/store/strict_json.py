"""JSON of files that nobody vouches for: size capped before reading, duplicate keys refused, always an object.

Used for config.json, index files, safetensors headers and coli.json. Every failure is a CheckpointError that names
the file and the fault; nothing here knows what the keys mean.
"""

import json
from pathlib import Path
from typing import Any

from coli.errors import CheckpointError
from coli.impostors import impostor, open_regular

MAX_CONFIG_BYTES = 8 << 20


def read_object(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The JSON object in the file at `path`; CheckpointError if it is missing, too large or not a plain object."""
    return parse_object(read_text_file(path, max_bytes), str(path))


def read_text_file(path: Path, max_bytes: int = MAX_CONFIG_BYTES) -> bytes:
    """The bytes of a file that should hold JSON; CheckpointError if it is missing, too large or a known impostor."""
    try:
        with open_regular(path) as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(data) > max_bytes:
        raise CheckpointError(f"{path}: larger than {max_bytes} bytes, the most such a file may have")
    refuse_impostor(path, data[:128])
    return data


def refuse_impostor(path: Path, start: bytes) -> None:
    """CheckpointError if `start`, the first bytes of the file, show what downloads leave in place of the real one."""
    found = impostor(start)
    if found is not None:
        raise CheckpointError(f"{path}: {found}")


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse `data` as one JSON object; `where` names it in the CheckpointError of anything else."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_object_without_duplicates)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        fault = f"{error.msg.removesuffix(' at')} at line {error.lineno}"
        raise CheckpointError(f"{where}: not valid JSON: {fault}: damaged or cut short, get the file again") from None
    except _DuplicateKey as error:
        raise CheckpointError(f"{where}: key {error.args[0]!r} appears twice") from None
    except (RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointError(f"{where}: not usable JSON: {reason}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


class _DuplicateKey(Exception):
    pass


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return result
