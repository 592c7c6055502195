"""`coli corpus download`: articles of Wikipedia as JSON lines, read row group by row group and never as whole files.

The hub's library names the files; ranges of them are read as the Parquet reader asks. What has been written counts once
its state is beside it, so a killed download goes on there. The licence is kept with the text.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coli import __version__
from coli.errors import DownloadError, OptionError
from coli.tools.output_file import checked_target, write_error

DATASET = "wikimedia/wikipedia"
SNAPSHOT = "20231101"
NAMES = ("wikipedia",)
BATCH_ROWS = 500
TIMEOUT_S = 60.0
TRIES = 5
_LANGUAGE = re.compile(r"[a-z]{2,12}(-[a-z]{2,12})*")

Notice = Callable[[str], None]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class DownloadOptions:
    """What to fetch: so many articles of the edition `language` in the snapshot of a day; token: for the hub."""

    max_docs: int
    language: str = "en"
    snapshot: str = SNAPSHOT
    token: str | None = None


@dataclass(frozen=True, slots=True)
class _State:
    """How far a download is: rows of file number `file` that are written, and the text's bytes and articles."""

    commit: str
    config: str
    file: int = 0
    row: int = 0
    docs: int = 0
    size: int = 0


def download_wikipedia(
    target: Path,
    options: DownloadOptions,
    notice: Notice,
    progress: Progress,
    pause: Callable[[float], None] = time.sleep,
) -> Path:
    """Write articles to `target`, one JSON object a line with text, title, url and id; returns the licence's file.

    Raises OptionError, DownloadError, WriteError. An interrupted download goes on when it is called again.
    """
    if not _LANGUAGE.fullmatch(options.language) or not re.fullmatch(r"\d{8}", options.snapshot):
        raise OptionError(
            f"wikipedia: {options.snapshot}.{options.language}: expected a date as 20231101 and a language as en"
        )
    target = checked_target(target)
    licence = target.with_name(f"{target.name}.licence.json")
    if target.exists():
        known = _read(licence)
        if (
            known.get("config") == f"{options.snapshot}.{options.language}"
            and known.get("documents", 0) >= options.max_docs
        ):
            notice(f"{target}: {known['documents']} articles are there already")
            return licence
        raise OptionError(
            f"{target}: is there already, with other or fewer articles; remove it or name another file (-o)"
        )
    hub, parquet = _libraries()
    part, notes = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.json")
    _try_writing(part)
    commit, files, licences = _listing(hub, options)
    state = _resumed(part, notes, commit, f"{options.snapshot}.{options.language}")
    if state.docs:
        notice(f"{target}: going on behind {state.docs} articles")
    try:
        with part.open("r+b" if part.exists() else "w+b") as file:
            file.truncate(state.size)
            file.seek(state.size)
            for number in range(state.file, len(files)):
                if state.docs >= options.max_docs:
                    break
                name, size = files[number]
                url = hub.hf_hub_url(DATASET, name, repo_type="dataset", revision=commit)
                source = RangeReader(url, size, options.token or hub.get_token(), pause)
                state = replace(state, file=number, row=state.row if number == state.file else 0)
                for now in _copied(parquet, source, name, file, state, options.max_docs):
                    state = now
                    file.flush()
                    os.fsync(file.fileno())
                    _write(notes, asdict(state))
                    progress("articles", state.docs, options.max_docs)
                if state.docs < options.max_docs:
                    state = replace(state, file=number + 1, row=0)
        if not state.docs:
            raise DownloadError(f"{DATASET}: {options.snapshot}.{options.language}: holds no article")
        _write(licence, _record(options, state, licences))
        os.replace(part, target)
        notes.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(target, error) from None
    notice(
        f"licence: {', '.join(licences) or 'not named by the dataset'}; recorded in {licence}, keep it with the text"
    )
    return licence


def _try_writing(part: Path) -> None:
    """Raise WriteError now rather than after minutes of reading."""
    is_new = not part.exists()
    try:
        with part.open("ab"):
            pass
        if is_new:
            part.unlink()
    except OSError as error:
        raise write_error(part, error) from None


def _copied(
    parquet: Any, source: RangeReader, name: str, file: io.BufferedRandom, state: _State, most: int
) -> Iterator[_State]:
    """Write the articles of one Parquet file from row `state.row` on; yields the state behind each batch."""
    try:
        table = parquet.ParquetFile(source)
        missing = {"text", "title", "url", "id"} - set(table.schema_arrow.names)
        if missing:
            raise DownloadError(f"{name}: no column {sorted(missing)[0]!r}: another kind of dataset than expected")
        row = 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if row + rows <= state.row:
                row += rows  # written before: not even read
                continue
            for batch in table.iter_batches(BATCH_ROWS, row_groups=[group], columns=["id", "url", "title", "text"]):
                articles = batch.to_pylist()
                skipped = max(0, min(len(articles), state.row - row))
                row += len(articles)
                written, used = 0, skipped
                for article in articles[skipped:]:
                    if state.docs + written >= most:
                        break
                    used += 1
                    if not article["text"] or not article["text"].strip():
                        continue
                    file.write(json.dumps(article, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
                    written += 1
                state = replace(state, row=row - len(articles) + used, docs=state.docs + written, size=file.tell())
                yield state
                if state.docs >= most:
                    return
    except (DownloadError, OSError):
        raise
    except Exception as error:  # the Parquet library's own kinds
        raise DownloadError(f"{name}: not a Parquet file that can be read: {str(error).splitlines()[0]}") from None


class RangeReader(io.RawIOBase):
    """A file behind an HTTP address, read in ranges; what a broken connection lacks is asked for again."""

    def __init__(self, url: str, size: int, token: str | None, pause: Callable[[float], None] = time.sleep) -> None:
        self._url, self._size, self._token, self._pause = url, size, token, pause
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        """`size` bytes, fewer only at the end. Raises DownloadError."""
        wanted = self._size - self._at if size is None or size < 0 else min(size, self._size - self._at)
        data = bytearray()
        failures = 0
        while len(data) < wanted:
            try:
                more = self._range(self._at + len(data), self._at + wanted)
            except OSError as error:
                more, reason = b"", str(getattr(error, "reason", None) or error)
                if isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500:
                    failures = TRIES
            else:
                reason = "the connection ended early"
            data += more
            failures = 0 if more else failures + 1
            if failures >= TRIES:
                raise DownloadError(f"{self._url}: {reason}; the same command goes on from here")
            if failures:
                self._pause(2.0 ** (failures - 1))
        self._at += wanted
        return bytes(data)

    def readall(self) -> bytes:
        return self.read(-1)

    def readinto(self, buffer: Any, /) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _range(self, begin: int, end: int) -> bytes:
        request = urllib.request.Request(self._url, headers={"User-Agent": f"coli/{__version__}"})
        request.add_header("Range", f"bytes={begin}-{end - 1}")
        request.add_header("Accept-Encoding", "identity")
        if self._token:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            if response.status != 206:
                raise DownloadError(f"{self._url}: the server does not send ranges (status {response.status})")
            found: bytes = b""
            with contextlib.suppress(OSError, ValueError):
                found = response.read(end - begin)
            return found


def _libraries() -> tuple[Any, Any]:
    try:
        import huggingface_hub
        import pyarrow.parquet
    except ImportError as error:
        raise OptionError(f"corpus download: needs the package {error.name}: pip install 'coli[corpus]'") from None
    return huggingface_hub, pyarrow.parquet


def _listing(hub: Any, options: DownloadOptions) -> tuple[str, list[tuple[str, int]], list[str]]:
    """(commit, Parquet files of the edition with their sizes, licences)."""
    config = f"{options.snapshot}.{options.language}"
    for last in (False, True):
        try:
            info = hub.HfApi(library_name="coli", token=options.token).dataset_info(DATASET, files_metadata=True)
            break
        except Exception as error:  # the hub's, its HTTP library's and the network's own kinds
            reason = str(error).strip().splitlines() or [type(error).__name__]
            if last or getattr(error, "response", None) is not None:
                raise DownloadError(f"{DATASET}: {reason[0]}") from None
    named = re.compile(rf"{re.escape(config)}/[\w.-]+\.parquet")
    files = sorted(
        (str(s.rfilename), int(s.size or 0)) for s in info.siblings or [] if named.fullmatch(str(s.rfilename))
    )
    if not files:
        known = sorted({str(s.rfilename).partition("/")[0] for s in info.siblings or [] if "/" in str(s.rfilename)})
        raise OptionError(f"{DATASET}: no edition {config}; there are {', '.join(known[:8])} …")
    licences = [tag.removeprefix("license:") for tag in info.tags or [] if tag.startswith("license:")]
    return str(info.sha), files, licences


def _resumed(part: Path, notes: Path, commit: str, config: str) -> _State:
    """What an interrupted download left, if it was of the same files."""
    fresh = _State(commit, config)
    try:
        state = _State(**_read(notes))
        good = state.commit == commit and state.config == config and part.stat().st_size >= state.size
    except (TypeError, OSError):
        return fresh
    return state if good else fresh


def _record(options: DownloadOptions, state: _State, licences: list[str]) -> dict[str, Any]:
    return {
        "dataset": DATASET,
        "config": state.config,
        "revision": state.commit,
        "documents": state.docs,
        "licences": licences,
        "attribution": f"Text of Wikipedia ({options.language}) and its authors; every article's address is in `url`.",
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
