"""The hidden work folder `.NAME.partial` next to the destination: lock, record of finished files, final rename.

A conversion killed at any point leaves at most this folder, which no command opens; the next run with the same source
and options keeps the files and portions its record lists and writes the rest. The destination appears by one rename.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from coli.convert.writer import sync_folder, write_error, write_file
from coli.errors import CheckpointError, DownloadError, OptionError, WriteError
from coli.store.container import PARTIAL_SUFFIX
from coli.store.manifest import MANIFEST
from coli.store.strict_json import read_object

STATE = "convert-state.json"
LOCK = "convert.lock"
SLACK_BYTES = 4 << 20  # of free space beyond the bytes to write: folders, block rounding


@dataclass(frozen=True, slots=True)
class Finished:
    """A weight file that is complete and was read back."""

    nbytes: int
    sha256: str


class WorkFolder:
    """The folder one conversion writes into. Use as a context manager; `job` identifies source and options."""

    def __init__(self, destination: Path, job: str) -> None:
        self.destination = destination
        self.path = destination.with_name(f".{destination.name}{PARTIAL_SUFFIX}")
        self._job = job
        self._finished: dict[str, Finished] = {}
        self._portions: dict[str, dict[int, int]] = {}  # of files begun: portion -> bytes of the whole file
        self._lock = -1

    def __enter__(self) -> Self:
        try:
            if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / LOCK).exists():
                raise OptionError(f"{self.path}: in the way, and not left by a conversion: move or delete it")
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read_state()
            self._remove_all_but(self._kept)
        except BlockingIOError:
            os.close(self._lock)
            raise OptionError(f"{self.destination}: another conversion is writing it") from None
        except OSError as error:
            raise write_error(self.path, error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """After an error keep only what a further run can use: finished files, unless the source itself is bad."""
        if self._lock < 0:
            return
        if kind is not None:
            with contextlib.suppress(OSError):
                resumable = issubclass(kind, (WriteError, DownloadError, KeyboardInterrupt))
                if resumable and (self._finished or self._portions):
                    self._remove_all_but(self._kept)
                else:
                    shutil.rmtree(self.path)
        os.close(self._lock)

    @property
    def finished(self) -> Mapping[str, Finished]:
        """Complete files by name."""
        return self._finished

    def portions(self, name: str) -> Set[int]:
        """Portions of the unfinished file `name` that are written and were read back."""
        return self._portions.get(name, {}).keys()

    def record(self, name: str, sha256: str) -> None:
        """Note, durably, that the file `name` is complete."""
        self._finished[name] = Finished((self.path / name).stat().st_size, sha256)
        self._portions.pop(name, None)
        self._write_state()

    def record_portion(self, name: str, number: int) -> None:
        """Note, durably, that a portion of the file `name` is written."""
        self._portions.setdefault(name, {})[number] = (self.path / name).stat().st_size
        self._write_state()

    def _write_state(self) -> None:
        files = {key: {"bytes": value.nbytes, "sha256": value.sha256} for key, value in self._finished.items()}
        portions = {
            name: {"bytes": max(sizes.values()), "written": sorted(sizes)} for name, sizes in self._portions.items()
        }
        state = {"job": self._job, "files": files, "portions": portions}
        write_file(self.path / STATE, json.dumps(state).encode())
        sync_folder(self.path)

    @property
    def _kept(self) -> set[str]:
        return {LOCK, STATE, *self._finished, *self._portions}

    def check_space(self, nbytes: int) -> None:
        """WriteError if the file system has less than `nbytes` free."""
        status = os.statvfs(self.path)
        free, needed = status.f_bavail * status.f_frsize, nbytes + SLACK_BYTES
        if free < needed:
            raise WriteError(
                f"{self.destination}: disk full: {needed} bytes needed, {free} free"
                f" ({needed / 1e9:.2f} and {free / 1e9:.2f} GB): free some space or choose another folder"
            )

    def publish(self) -> None:
        """Turn the work folder into the destination by one rename."""
        sync_folder(self.path)
        try:
            os.rename(self.path, self.destination)
            for name in (STATE, LOCK):
                (self.destination / name).unlink(missing_ok=True)
        except OSError as error:
            raise write_error(self.destination, error) from None
        sync_folder(self.destination.parent)

    def _read_state(self) -> None:
        """What an earlier run of the same job finished; nothing for another job or a damaged record."""
        if not (self.path / STATE).exists():
            return
        try:
            state = read_object(self.path / STATE)
            files = {name: Finished(item["bytes"], item["sha256"]) for name, item in state["files"].items()}
            begun = {name: dict.fromkeys(item["written"], item["bytes"]) for name, item in state["portions"].items()}
            if state["job"] != self._job:
                return
            self._finished = {name: item for name, item in files.items() if self._size(name) == item.nbytes}
            self._portions = {
                name: item for name, item in begun.items() if item and self._size(name) == max(item.values())
            }
        except (CheckpointError, KeyError, TypeError, AttributeError):
            self._finished, self._portions = {}, {}

    def _size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except OSError:
            return None

    def _remove_all_but(self, names: Iterable[str]) -> None:
        keep = set(names)
        for path in self.path.iterdir():
            if path.name not in keep:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()


def refuse_destination(source: Path, destination: Path) -> None:
    """OptionError unless `destination` is absent or an empty folder, not in the source, not the current folder."""
    if destination.resolve() == source.resolve() or source.resolve() in destination.resolve().parents:
        raise OptionError(f"{destination}: inside the source folder, which is never written to: choose another folder")
    if destination.is_symlink() or destination.is_file():
        raise OptionError(f"{destination}: exists and is no folder: choose another name")
    if (destination / MANIFEST).exists():
        raise OptionError(f"{destination}: already holds a coli model: delete it or choose another folder")
    if destination.is_dir() and any(destination.iterdir()):
        raise OptionError(f"{destination}: folder is not empty: choose a new one")
    if destination.is_dir() and destination.samefile("."):  # it would be replaced, and the shell left in the old one
        raise OptionError(f"{destination}: the current folder cannot become the model: choose a new name in it")
