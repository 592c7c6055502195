"""What goes wrong while experts stream, as the user of `coli run` sees it: one line and status 1, or the same ids."""

import errno
import itertools
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from containers import container, expected

from coli.store import record_files
from coli.store.record_files import MappedFiles, SlotFiles

EXPECTED = expected("olmoe-base")
PROMPT = ",".join(map(str, EXPECTED["prompt_ids"]))
SLOT_MODES = ["pread", "direct"]
MODES = ["mmap", *SLOT_MODES]


@pytest.fixture
def run(coli, tmp_path, monkeypatch):
    """`coli run` on a copy of a small model that holds two experts a layer: it reads all the time."""
    folder = tmp_path / "olmoe"
    shutil.copytree(container("olmoe-base", "f32"), folder)
    monkeypatch.setenv("CAP", "2")

    def call(mode: str, *args: object):  # type: ignore[no-untyped-def]
        fixed = ("--prompt-ids", PROMPT, "--ngen", 24, "--ignore-eos", "--tokens", "--pin", "off")
        return coli("run", "--model", folder, "--io", mode, *fixed, *args)

    call.folder = folder  # type: ignore[attr-defined]
    return call


def ids_of(err: str) -> list[int]:
    (line,) = [line for line in err.splitlines() if line.startswith("[TOKENS] ")]
    return [int(token_id) for token_id in line.partition(" generated:")[2].split()]


def cut_after(reads: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the files of experts to their headers when so many records have been read."""
    numbers, taking = itertools.count(1), threading.Lock()  # several readers count

    def count() -> None:
        with taking:
            number = next(numbers)
        if number == reads:
            for path in folder.glob("experts-*.safetensors"):
                os.truncate(path, record_files.PAGE_BYTES)

    for cls, name in ((SlotFiles, "read"), (MappedFiles, "populate")):
        original = getattr(cls, name)

        def counted(self, *args, original=original):  # type: ignore[no-untyped-def]
            count()
            return original(self, *args)

        monkeypatch.setattr(cls, name, counted)


@pytest.mark.parametrize("mode", SLOT_MODES)
@pytest.mark.parametrize("reads", [1, 40])
def test_a_file_cut_while_running_is_one_line_and_status_1(run, mode, reads, monkeypatch):
    cut_after(reads, run.folder, monkeypatch)
    done = run(mode, "--quiet")
    assert done.status == 1
    (line,) = [line for line in done.err.splitlines() if not line.startswith("[")]
    assert "experts-" in line
    assert "cut after it was opened" in line


def test_a_mapped_file_cut_before_its_records_are_brought_in_is_one_line_and_status_1(run, monkeypatch):
    """A record in use at that moment ends the process instead (docs/streaming.md)."""
    cut_after(1, run.folder, monkeypatch)
    done = run("mmap", "--quiet")
    assert done.status == 1
    (line,) = [line for line in done.err.splitlines() if not line.startswith("[")]
    assert "cut after it was opened" in line


@pytest.mark.parametrize("good", [0, 7, 30])
def test_direct_reads_that_are_refused_as_misaligned_go_on_buffered(run, good, monkeypatch):
    """EINVAL from some read on, as from a device of larger sectors than it says: the same ids, one notice."""
    direct: set[int] = set()
    opened, preadv, left = os.open, os.preadv, [good]

    def recording_open(path, flags, *args):  # type: ignore[no-untyped-def]
        fd = opened(path, flags, *args)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def misaligned(fd, views, offset):  # type: ignore[no-untyped-def]
        if fd in direct and len(views[0]) > record_files.PAGE_BYTES:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return preadv(fd, views, offset)

    init = SlotFiles.__init__
    monkeypatch.setattr(SlotFiles, "__init__", lambda self, *args: init(self, *args[:3], misaligned))
    monkeypatch.setattr(record_files.os, "open", recording_open)
    done = run("direct")
    assert done.status == 0
    assert ids_of(done.err) == EXPECTED["greedy_ids"][:24]
    assert sum("direct reads are refused" in line for line in done.err.splitlines()) == 1


@pytest.fixture
def no_locked_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, hard))
    yield
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


@pytest.mark.usefixtures("no_locked_memory")
@pytest.mark.parametrize("mode", MODES)
def test_no_memory_has_to_be_locked(run, mode):
    done = run(mode)
    assert done.status == 0
    assert ids_of(done.err) == EXPECTED["greedy_ids"][:24]
