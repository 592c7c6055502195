"""Sessions in a file: ids and cache rows of one or more timelines, bit for bit, beside the model's fingerprint.

Plain safetensors, written whole or not at all, with a digest of what it holds; a session read back goes on with the
bytes of one that never stopped. Knows neither messages nor requests: whoever keeps the file adds a note of its own.
Used by `coli.conversation` and the server's worker, on the thread that calls the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coli.engine.session import Session
from coli.errors import CheckpointError, OptionError, WriteError
from coli.model.kv_cache import KVCache
from coli.store.safetensors_file import DOWNLOAD_AGAIN, SafetensorsFile

FORMAT = "coli session 2"
_TYPES = {"uint16": "U16", "float32": "F32", "int64": "I64"}
_KV = {"U16": "f16", "F32": "f32"}
_NO_DIGEST = "0" * 64


@dataclass(frozen=True, slots=True)
class SessionFile:
    """One file; `keeper` is the command that keeps it, `fingerprint` the model's."""

    path: Path
    keeper: str
    fingerprint: str

    def check_writable(self) -> None:
        """Raises OptionError where `save` could not work: known before the first answer, not at the end."""
        target = self.path.resolve()
        if target.exists() and not target.is_file():
            raise OptionError(f"{self.path}: is no regular file, in which sessions could be kept; name another one")
        try:
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            os.close(handle)
            os.unlink(name)
        except OSError as error:
            raise OptionError(
                f"{self.path}: no session can be kept there: {error.strerror}; name a file in a folder that can be "
                "written"
            ) from None

    def save(self, sessions: Sequence[Session], note: str = "") -> None:
        """Write the rows the sessions hold, and `note`. Raises WriteError; the file is then as it was."""
        target, name = self.path.resolve(), ""
        try:
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            with os.fdopen(handle, "wb") as file:
                digest = self._digest(len(sessions), note)
                arrays = dict(_arrays(sessions))
                file.write(self._header(arrays, note, len(sessions), _NO_DIGEST))
                for array in arrays.values():
                    for part in _parts(array):
                        data = np.ascontiguousarray(part).tobytes()
                        digest.update(data)
                        file.write(data)
                file.seek(0)
                file.write(self._header(arrays, note, len(sessions), digest.hexdigest()))
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, target)
        except OSError as error:
            with suppress(OSError):
                os.unlink(name)
            raise WriteError(f"{self.path}: the session is not written: {error.strerror or error}") from None
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    def load(self, most: int, new_session: Callable[[], Session]) -> tuple[list[Session], str]:
        """The sessions, at most `most` of them, and the note.

        Raises CheckpointError for a damaged file, OptionError for one of another command or model, of other settings.
        """
        try:
            file = SafetensorsFile(self.path)
        except CheckpointError as error:
            reason = str(error).removeprefix(f"{self.path}: ").removesuffix(f": {DOWNLOAD_AGAIN}")
            raise self._damaged(reason) from None
        with file:
            metadata = file.header.metadata
            if metadata.get("format") != FORMAT:
                raise CheckpointError(f"{self.path}: expected a file of `{FORMAT}`, found another: name another file")
            if metadata.get("keeper") != self.keeper:
                other = str(metadata.get("keeper"))[:40]
                raise OptionError(f"{self.path}: is kept by {other}, this is {self.keeper}: name another file")
            if metadata.get("model") != self.fingerprint:
                raise OptionError(f"{self.path}: the session belongs to another model; name another file or that model")
            note, count = metadata.get("note", ""), metadata.get("sessions", "")
            if not re.fullmatch("[0-9]{1,6}", count):
                raise self._damaged(f"expected a number of sessions, found {count[:40]!r}")
            if int(count) > most:
                raise OptionError(f"{self.path}: holds {count} conversations, here is room for {most}: raise --slots")
            digest = self._digest(int(count), note)
            sessions = [self._read(file, at, new_session, digest) for at in range(int(count))]
            if digest.hexdigest() != metadata.get("digest"):
                raise self._damaged("its digest is another")
        return sessions, note

    def _read(self, file: SafetensorsFile, at: int, new_session: Callable[[], Session], digest: Any) -> Session:
        """Session number `at`."""
        session, tensors = new_session(), file.header.tensors
        cache = session.cache
        assert isinstance(cache, KVCache)
        ids = tensors.get(f"{at}.token_ids")
        if ids is None or ids.dtype != "I64" or len(ids.shape) != 1:
            raise self._damaged(f"{at}.token_ids: expected a list of ids")
        length = ids.shape[0]
        if length > cache.capacity:
            raise OptionError(
                f"{self.path}: a session has {length} positions, the context {cache.capacity}: raise --ctx, or name "
                "another file"
            )
        arrays = {"token_ids": np.zeros(length, np.int64), **cache.saved(length)}
        found = {name.removeprefix(f"{at}."): each for name, each in tensors.items() if name.startswith(f"{at}.")}
        for name, array in arrays.items():
            wanted, there = (_TYPES[array.dtype.name], array.shape), found.pop(name, None)
            if there is None or (there.dtype, there.shape) != wanted:
                raise self._misfit(f"{at}.{name}", wanted, None if there is None else (there.dtype, there.shape))
            at_byte = 0
            for part in _parts(array):
                data = file.read(there, at_byte, part.nbytes)
                digest.update(data)
                part[...] = data.view(array.dtype).reshape(part.shape)
                at_byte += part.nbytes
        if found:
            raise self._damaged(f"{at}.{next(iter(found))}: not of this model's cache")
        try:
            cache.restore(arrays, length)
        except CheckpointError as error:
            raise self._damaged(f"{at}.{error}") from None
        session.token_ids = arrays["token_ids"].tolist()
        return session

    def _misfit(self, name: str, wanted: tuple[str, Any], found: tuple[str, Any] | None) -> Exception:
        here, there = _KV.get(wanted[0]), _KV.get(found[0]) if found else None
        if here and there and here != there:
            return OptionError(
                f"{self.path}: its keys and values are {there}, here they would be {here}: give --kv {there}, or name "
                "another file"
            )
        return self._damaged(f"{name}: expected {wanted[0]} {list(wanted[1])}, found {found and list(found[1])}")

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: no session that can be read ({reason}): remove it, or name another file")

    def _digest(self, count: int, note: str) -> Any:
        """To be fed the bytes of all arrays, in their order."""
        return hashlib.sha256(json.dumps([self.keeper, self.fingerprint, count, note]).encode())

    def _header(self, arrays: dict[str, NDArray[Any]], note: str, count: int, digest: str) -> bytes:
        metadata = {
            "format": FORMAT,
            "keeper": self.keeper,
            "model": self.fingerprint,
            "sessions": str(count),
            "note": note,
            "digest": digest,
        }
        table: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        for name, array in arrays.items():
            offsets = [end, end + array.nbytes]
            table[name] = {"dtype": _TYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
            end += array.nbytes
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


def _arrays(sessions: Sequence[Session]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Named arrays of all sessions, in the order of the file."""
    for at, session in enumerate(sessions):
        cache = session.cache
        assert isinstance(cache, KVCache)
        length = min(cache.length, len(session.token_ids))
        yield f"{at}.token_ids", np.array(session.token_ids[:length], np.int64)
        for name, array in cache.saved(length).items():
            yield f"{at}.{name}", array


def _parts(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Views of the array in order: one layer's rows at a time, so that what is copied of them stays small."""
    if array.ndim < 2:
        yield array
    else:
        yield from array
