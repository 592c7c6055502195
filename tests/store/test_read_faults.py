"""Reads that fail: one line naming file and offset, never a wrong byte, never a hang, and the store stays usable."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from store.fake_records import RECORD_BYTES, routes, write_records
from store.stores import consume, make_store

from coli.errors import ReadError
from coli.store import record_files
from coli.store.record_files import IoMode, SlotFiles, direct_refusal

L, E, A = 3, 8, 3
UNION = np.array([[0, 2, 4], [1, 2, 5]])


def failing(offsets: set[int], error: int) -> record_files.Preadv:
    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        if offset in offsets:
            raise OSError(error, os.strerror(error))
        return os.preadv(fd, views, offset)

    return preadv


@pytest.mark.parametrize("mode", ["pread", "direct"])
@pytest.mark.parametrize("slots", [1, 2, 10])
@pytest.mark.parametrize("prefill", [False, True])
def test_a_device_error_reaches_the_waiting_thread(tmp_path: Path, mode: str, slots: int, prefill: bool) -> None:
    layouts = write_records(tmp_path, L, E)
    bad = {layouts[0].offset + 4 * RECORD_BYTES}
    store = make_store(layouts, E, slots, mode, preadv=failing(bad, errno.EIO))
    line = rf"experts-00000.bin: reading 4096 bytes at offset {min(bad)} failed: Input"
    for _ in range(3):
        with pytest.raises(ReadError, match=line):
            consume(store, 0, UNION, prefill)
        assert np.count_nonzero(store.residency) <= slots
        assert consume(store, 1, UNION, prefill)
    bad.clear()
    assert sorted(consume(store, 0, UNION, prefill)) == [0, 1, 2, 4, 5]
    store.close()


@pytest.mark.parametrize("mode", ["pread", "direct"])
def test_short_reads_are_continued(tmp_path: Path, mode: str) -> None:
    layouts = write_records(tmp_path, L, E, 2 * RECORD_BYTES)

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        return os.preadv(fd, [views[0][:RECORD_BYTES]], offset)

    files = SlotFiles({layouts[0].path}, IoMode(mode), lambda line: None, preadv)
    slot = np.zeros(4 * RECORD_BYTES, np.uint8)
    skip = -slot.ctypes.data % RECORD_BYTES
    view = memoryview(slot)[skip : skip + 2 * RECORD_BYTES]
    files.read(layouts[0].path, layouts[0].offset, view)
    assert bytes(view) == layouts[0].path.read_bytes()[4096 : 4096 + 2 * RECORD_BYTES]
    files.close()


@pytest.mark.parametrize("mode", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("kept", [0, 1])
def test_a_file_cut_while_running_is_named(tmp_path: Path, mode: str, kept: int) -> None:
    layouts = write_records(tmp_path, L, E)
    store = make_store(layouts, E, 4, mode)
    consume(store, 0, UNION)
    os.truncate(layouts[0].path, layouts[0].offset + kept * RECORD_BYTES)
    with pytest.raises(ReadError, match=r"experts-00000.bin: .* cut after it was opened"):
        consume(store, 0, np.array([[6, 7]]))
    store.close()


def test_a_record_cut_in_the_middle_is_an_error_in_direct_mode(tmp_path: Path) -> None:
    layouts = write_records(tmp_path, L, E, 2 * RECORD_BYTES)
    os.truncate(layouts[0].path, layouts[0].offset + 7 * 2 * RECORD_BYTES + 5000)
    files = SlotFiles({layouts[0].path}, IoMode.DIRECT, lambda line: None)
    slot = np.zeros(4 * RECORD_BYTES, np.uint8)
    skip = -slot.ctypes.data % RECORD_BYTES
    with pytest.raises(ReadError, match="needs 3192 more"):
        files.read(
            layouts[0].path, layouts[0].offset + 7 * 2 * RECORD_BYTES, memoryview(slot)[skip : skip + 2 * RECORD_BYTES]
        )
    files.close()


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_direct_reads_refused_at_read_fall_back_once(tmp_path: Path, error: int) -> None:
    layouts = write_records(tmp_path, L, E)
    direct_fds: set[int] = set()
    opened = os.open

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        if fd in direct_fds:
            raise OSError(error, os.strerror(error))
        return os.preadv(fd, views, offset)

    def recording_open(path: str, flags: int) -> int:
        fd = opened(path, flags)
        if flags & os.O_DIRECT:
            direct_fds.add(fd)
        else:
            direct_fds.discard(fd)
        return fd

    notices: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_files.os, "open", recording_open)
        store = make_store(layouts, E, 5, "direct", preadv=preadv, notices=notices, reader_threads=4)
        for forward in routes(seed=1, forwards=10, num_layers=L, num_experts=E, num_experts_per_tok=A):
            for layer_idx, expert_ids in enumerate(forward):
                consume(store, layer_idx, expert_ids)
        assert store.stats().mode == "pread"
        store.close()
    assert len(notices) == 1
    assert "direct reads are refused" in notices[0]


def test_direct_reads_refused_at_open_fall_back_with_a_notice(tmp_path: Path) -> None:
    layouts = write_records(tmp_path, L, E)
    opened = os.open

    def refusing_open(path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags)

    notices: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_files.os, "open", refusing_open)
        store = make_store(layouts, E, 5, "direct", notices=notices)
        assert sorted(consume(store, 0, UNION)) == [0, 1, 2, 4, 5]
        assert store.stats().mode == "pread"
        store.close()
    assert len(notices) == 1


def test_other_errors_of_open_are_not_taken_for_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        direct_refusal(tmp_path / "absent")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs procfs")
def test_a_file_system_without_direct_reads_is_recognised() -> None:
    assert direct_refusal(Path("/proc/self/status")) is not None


def test_a_lost_answer_is_read_again(tmp_path: Path) -> None:
    """An interrupt may hit between a read's end and its bookkeeping."""
    store = make_store(write_records(tmp_path, L, E), E, 6)
    store.fetch(0, UNION, prefill=False)
    lost = store._readers.receive(block=True)
    assert lost is not None
    del store._inflight[lost.key]
    assert sorted(consume(store, 0, UNION)) == [0, 1, 2, 4, 5]
    store.close()
