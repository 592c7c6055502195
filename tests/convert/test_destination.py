"""The destination appears whole or not at all: refusals, full disks, kills at any point, resuming."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from convert.checkpoints import ORACLE, copy_fixture, edit_config

from coli.convert import ConvertOptions, ConvertReport, convert
from coli.convert.work import WorkFolder
from coli.errors import CheckpointError, ColiError, NotConvertedError, OptionError, WriteError
from coli.store.container import Container

Run = Callable[..., ConvertReport]
FIXTURE = ORACLE / "mixtral-base"
WEIGHTS = ("dense.safetensors", "experts-00001.safetensors", "experts-00002.safetensors")


@pytest.fixture(autouse=True)
def _three_weight_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coli.convert.plan.SHARD_BYTES", 1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# refusals


def test_an_existing_container_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    run(FIXTURE)
    before = contents(tmp_path / "model")
    with pytest.raises(OptionError, match="already holds a coli model: delete it or choose another folder"):
        run(FIXTURE)
    assert contents(tmp_path / "model") == before


def test_a_folder_with_something_in_it_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match="folder is not empty"):
        run(FIXTURE)
    assert contents(tmp_path / "model") == {"notes.txt": b"mine"}


def test_an_empty_folder_is_filled(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    run(FIXTURE)
    assert Container.open(tmp_path / "model").moe_layers == (0, 1)


def test_the_current_folder_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    with pytest.raises(OptionError, match="the current folder cannot become the model"):
        run(FIXTURE)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_parents_of_the_destination_are_made(run: Run, tmp_path: Path) -> None:
    run(FIXTURE, tmp_path / "a" / "b")
    assert Container.open(tmp_path / "a" / "b").moe_layers == (0, 1)


def test_a_file_in_the_way_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(OptionError, match="exists and is no folder"):
        run(FIXTURE)


@pytest.mark.parametrize("inside", [".", "converted", "a/b"])
def test_nothing_is_written_into_the_source(run: Run, tmp_path: Path, inside: str) -> None:
    source = copy_fixture("mixtral-base", tmp_path / "source")
    before = contents(source)
    with pytest.raises(OptionError, match="inside the source folder"):
        run(source, source / inside)
    assert contents(source) == before


def test_a_folder_of_someone_else_under_the_working_name_is_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "mine").write_text("mine")
    with pytest.raises(OptionError, match="in the way, and not left by a conversion"):
        run(FIXTURE)
    assert contents(tmp_path / ".model.partial") == {"mine": b"mine"}


def test_two_conversions_to_one_place_do_not_meet(run: Run, tmp_path: Path) -> None:
    with WorkFolder(tmp_path / "model", "job"), pytest.raises(OptionError, match="another conversion is writing it"):
        run(FIXTURE)


def test_the_work_folder_of_an_unfinished_conversion_does_not_open(tmp_path: Path, run: Run) -> None:
    run(FIXTURE)
    (tmp_path / "model").rename(tmp_path / ".model.partial")
    with pytest.raises(NotConvertedError, match="unfinished conversion"):
        Container.open(tmp_path / ".model.partial")


# disks


def failing_write(monkeypatch: pytest.MonkeyPatch, allowed: int, code: int) -> None:
    """os.write takes `allowed` bytes in all and then fails, after a short write."""
    write, left = os.write, [allowed]

    def limited(descriptor: int, data: bytes) -> int:
        if left[0] == 0:
            raise OSError(code, os.strerror(code))
        count = write(descriptor, memoryview(data)[: left[0]])
        left[0] -= count
        return count

    monkeypatch.setattr(os, "write", limited)


@pytest.mark.parametrize("allowed", [0, 5000, 200_000])
def test_a_full_disk_is_one_line_and_leaves_nothing_before_the_first_finished_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    failing_write(monkeypatch, allowed, errno.ENOSPC)
    with pytest.raises(WriteError, match=r"dense\.safetensors: disk full: free some space and convert again") as raised:
        run(FIXTURE)
    assert raised.value.exit_code == 1
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_later_keeps_the_finished_files_for_the_next_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(FIXTURE, tmp_path / "whole")
    size = (tmp_path / "whole" / "dense.safetensors").stat().st_size
    with monkeypatch.context() as patch:
        failing_write(patch, size + 20_000, errno.ENOSPC)
        with pytest.raises(WriteError, match=r"experts-00001\.safetensors: disk full"):
            run(FIXTURE)
    assert not (tmp_path / "model").exists()
    assert set(contents(tmp_path / ".model.partial")) == {"dense.safetensors", "convert-state.json", "convert.lock"}
    assert run(FIXTURE).resumed_files == 1
    assert contents(tmp_path / "model") == contents(tmp_path / "whole")
    assert not (tmp_path / ".model.partial").exists()


def test_other_write_failures_name_the_file_and_the_reason(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_write(monkeypatch, 1000, errno.EIO)
    with pytest.raises(WriteError, match=r"dense\.safetensors: cannot be written: Input/output error"):
        run(FIXTURE)
    assert not list(tmp_path.iterdir())


def test_space_is_checked_before_anything_is_written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    tiny = os.statvfs_result((*real[:3], 10, 10, *real[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: tiny)
    with pytest.raises(WriteError, match=rf"disk full: \d+ bytes needed, {10 * real.f_frsize} free \("):
        run(FIXTURE)
    assert not list(tmp_path.iterdir())


def test_a_write_that_does_not_read_back_is_noticed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def flip(descriptor: int, data: bytes) -> int:
        return write(descriptor, bytes([data[0] ^ 1]) + bytes(data[1:]))

    monkeypatch.setattr(os, "write", flip)
    with pytest.raises(WriteError, match="reads back differently"):
        run(FIXTURE)
    assert not (tmp_path / "model").exists()


def test_a_file_size_limit_is_one_line_in_a_real_process(tmp_path: Path) -> None:
    script = (
        "import resource, sys; from pathlib import Path\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from coli.convert import ConvertOptions, convert; from coli.errors import ColiError\n"
        "try: convert(Path(sys.argv[1]), Path(sys.argv[2]), ConvertOptions('f32'), print)\n"
        "except ColiError as error: print(error); sys.exit(error.exit_code)\n"
    )
    command = [sys.executable, "-c", script, str(FIXTURE), str(tmp_path / "model")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.endswith("dense.safetensors: cannot be written: File too large\n")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"cannot be written: Not a directory"):
        run(FIXTURE, tmp_path / "file" / "model")


# interruptions


def interrupted(source: Path, destination: Path, finished: int) -> None:
    """Start a float32 conversion and interrupt it when `finished` weight files are complete."""
    work = destination.with_name(f".{destination.name}.partial")

    def interrupt(done: int, total: int) -> None:
        if done and (work / WEIGHTS[finished]).exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, destination, ConvertOptions("f32"), print, interrupt)


KILLED = """
import os, signal, sys
from pathlib import Path
import coli.convert.plan
from coli.convert import ConvertOptions, convert
from coli.convert import work, writer

coli.convert.plan.SHARD_BYTES = 1
point, source, destination = sys.argv[1:]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def after(owner, name, calls):
    real, left = getattr(owner, name), [calls]
    def counted(*arguments):
        result = real(*arguments)
        left[0] -= 1
        if left[0] == 0:
            die()
        return result
    setattr(owner, name, counted)

kind, _, calls = point.partition(":")
if kind == "write":
    after(writer, "write_all", int(calls))
elif kind == "record":
    after(work.WorkFolder, "record", int(calls))
elif kind == "publish":
    work.WorkFolder.publish = die
elif kind == "rename":
    after(os, "rename", 1)
convert(Path(source), Path(destination), ConvertOptions("f32"), print)
"""


def killed(point: str, source: Path, destination: Path) -> None:
    command = [sys.executable, "-c", KILLED, point, str(source), str(destination)]
    result = subprocess.run(command, capture_output=True, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr


@pytest.mark.parametrize(
    ("point", "kept"),
    [
        ("write:1", 0),
        ("write:9", 0),
        ("record:1", 1),
        ("write:25", 1),
        ("record:2", 2),
        ("record:3", 3),
        ("publish", 3),
    ],
)
def test_killed_anywhere_nothing_opens_and_the_next_run_completes_it(
    run: Run, tmp_path: Path, point: str, kept: int
) -> None:
    run(FIXTURE, tmp_path / "whole")
    killed(point, FIXTURE, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(ColiError):
        Container.open(tmp_path / ".model.partial")
    report = run(FIXTURE)
    assert report.resumed_files == kept
    assert bool(run.notices) is (kept > 0)  # type: ignore[attr-defined]
    assert contents(tmp_path / "model") == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "whole"]


def test_killed_right_after_the_rename_the_container_is_whole(tmp_path: Path) -> None:
    killed("rename", FIXTURE, tmp_path / "model")
    assert Container.open(tmp_path / "model").moe_layers == (0, 1)


def test_kept_files_are_not_written_again(run: Run, tmp_path: Path) -> None:
    interrupted(FIXTURE, tmp_path / "model", 2)
    before = {name: (tmp_path / ".model.partial" / name).stat().st_mtime_ns for name in WEIGHTS[:2]}
    run(FIXTURE)
    assert {name: (tmp_path / "model" / name).stat().st_mtime_ns for name in WEIGHTS[:2]} == before


def test_other_options_start_afresh(run: Run, tmp_path: Path) -> None:
    interrupted(FIXTURE, tmp_path / "model", 2)
    assert run(FIXTURE, dense="q8").resumed_files == 0


def test_a_changed_source_starts_afresh(run: Run, tmp_path: Path) -> None:
    source = copy_fixture("mixtral-base", tmp_path / "source")
    interrupted(source, tmp_path / "model", 2)
    edit_config(source, num_experts_per_tok=3)
    assert run(source).resumed_files == 0


@pytest.mark.parametrize("state", ["", "{}", "[1]", '{"job": 3, "files": 7}', '{"job": "x", "files": {"a": 1}}'])
def test_a_damaged_record_starts_afresh(run: Run, tmp_path: Path, state: str) -> None:
    interrupted(FIXTURE, tmp_path / "model", 1)
    (tmp_path / ".model.partial" / "convert-state.json").write_text(state)
    assert run(FIXTURE).resumed_files == 0


def test_a_kept_file_of_another_size_is_written_again(run: Run, tmp_path: Path) -> None:
    interrupted(FIXTURE, tmp_path / "model", 2)
    os.truncate(tmp_path / ".model.partial" / WEIGHTS[1], 5000)
    assert run(FIXTURE).resumed_files == 1
    assert Container.open(tmp_path / "model").moe_layers == (0, 1)


def test_an_interrupt_leaves_only_what_the_next_run_uses(run: Run, tmp_path: Path) -> None:
    interrupted(FIXTURE, tmp_path / "model", 1)
    assert set(contents(tmp_path / ".model.partial")) == {WEIGHTS[0], "convert-state.json", "convert.lock"}
    assert run(FIXTURE).resumed_files == 1


def test_an_interrupt_before_the_first_finished_file_leaves_nothing(tmp_path: Path) -> None:
    interrupted(FIXTURE, tmp_path / "model", 0)
    assert not list(tmp_path.iterdir())


def test_a_source_that_changes_meanwhile_is_refused(run: Run, tmp_path: Path) -> None:
    source = copy_fixture("mixtral-base", tmp_path / "source")

    def touch(done: int, total: int) -> None:
        os.utime(source / "model.safetensors", ns=(done, done))

    with pytest.raises(CheckpointError, match="changed while it was being converted"):
        convert(source, tmp_path / "model", ConvertOptions("f32"), print, touch)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_source_cut_meanwhile_is_an_error_with_file_and_offset(run: Run, tmp_path: Path) -> None:
    source = copy_fixture("mixtral-base", tmp_path / "source")

    def cut(done: int, total: int) -> None:
        if done:
            os.truncate(source / "model.safetensors", 100_000)

    with pytest.raises(ColiError, match=r"model\.safetensors: ends at byte \d+, \d+ bytes early"):
        convert(source, tmp_path / "model", ConvertOptions("f32"), print, cut)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_record_is_readable_json(tmp_path: Path) -> None:
    interrupted(FIXTURE, tmp_path / "model", 1)
    state = json.loads((tmp_path / ".model.partial" / "convert-state.json").read_text())
    assert list(state["files"]) == [WEIGHTS[0]]


def test_it_quantizes_on_the_cores_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coli.convert.options.usable_cores", lambda: 3)
    assert (ConvertOptions().num_threads(), ConvertOptions(threads=1).num_threads()) == (3, 1)
