"""The file of remembered costs: round trip, several models and machines, and everything that is not such a file."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coli.drafts.costs import RowCosts
from coli.drafts.gate_file import MOST_BYTES, MOST_ENTRIES, GateFile
from coli.errors import OptionError


def measured(ratio: float = 2.0) -> RowCosts:
    costs = RowCosts()
    for _ in range(5):
        costs.add(1, 0.01, 50)
        costs.add(4, 0.01 * ratio, 300)
    return costs


def read(path: Path, container: str = "model", machine: str = "here") -> RowCosts:
    costs = RowCosts()
    GateFile(path, container, machine).read_into(costs)
    return costs


def test_what_was_measured_is_remembered_per_container_and_machine(tmp_path: Path):
    path = tmp_path / "new" / "gate.json"
    GateFile(path, "model", "here").save(measured())
    GateFile(path, "model", "there").save(measured(3.0))
    assert read(path).ratio(4) == pytest.approx(2.0, rel=0.05)
    assert read(path, machine="there").ratio(4) == pytest.approx(3.0, rel=0.05)
    assert read(path).expert_bytes(1) == 50
    assert not read(path, container="other").is_known(4)
    assert [entry.name for entry in path.parent.iterdir()] == ["gate.json"], "nothing temporary is left"


def test_counts_of_an_earlier_run_stay_beside_new_ones(tmp_path: Path):
    path = tmp_path / "gate.json"
    GateFile(path, "model", "here").save(measured())
    later = RowCosts()
    later.add(1, 0.01, 0)
    later.add(9, 0.03, 0)
    GateFile(path, "model", "here").save(later)
    assert read(path).is_known(4)
    assert read(path).is_known(9)


def test_nothing_measured_writes_nothing(tmp_path: Path):
    plain = RowCosts()
    plain.add(1, 0.01, 0)
    GateFile(tmp_path / "gate.json", "model", "here").save(plain)
    assert not (tmp_path / "gate.json").exists()


def test_a_link_stays_one_and_a_file_keeps_who_may_read_it(tmp_path: Path):
    kept, link = tmp_path / "kept" / "costs.json", tmp_path / "gate.json"
    GateFile(kept, "model", "here").save(measured())
    kept.chmod(0o644)
    link.symlink_to(kept)
    GateFile(link, "model", "there").save(measured())
    assert link.is_symlink()
    assert kept.stat().st_mode & 0o777 == 0o644
    assert read(kept, machine="there").is_known(4)


def test_a_joke_of_a_file_is_outweighed_by_the_first_samples(tmp_path: Path):
    path = tmp_path / "gate.json"
    rows = {str(count): [0.001, 0] for count in range(1, 65)}
    entry = {"container": "model", "machine": "here", "rows": rows}
    path.write_text(json.dumps({"format": "coli-gate", "version": 1, "entries": [entry]}))
    costs = read(path)
    assert costs.ratio(64) < 1.5
    costs.add(1, 0.01, 0)
    costs.add(64, 0.3, 0)
    assert costs.ratio(64) > 5


def test_the_file_stays_small(tmp_path: Path):
    path = tmp_path / "gate.json"
    for number in range(MOST_ENTRIES + 5):
        GateFile(path, f"model {number}", "here " * 1000).save(measured())
    assert len(json.loads(path.read_text())["entries"]) == MOST_ENTRIES
    assert not read(path, "model 0", "here " * 1000).is_known(4)
    assert read(path, f"model {MOST_ENTRIES + 4}", "here " * 1000).is_known(4)


def entry(rows: object) -> str:
    return json.dumps(
        {"format": "coli-gate", "version": 1, "entries": [{"container": "model", "machine": "here", "rows": rows}]}
    )


DAMAGED = [
    "{",
    "hello",
    "[1, 2]",
    '{"format": "coli-usage", "version": 1}',
    '{"format": "coli-gate", "version": 2, "entries": []}',
    '{"format": "coli-gate", "version": 1, "entries": {}}',
    '{"format": "coli-gate", "version": 1, "entries": [7]}',
    "[" * 100_000,
    entry({"4": [2.0, 100]})[:-20],
    entry([4]),
    entry({"0": [2.0, 100]}),
    entry({"65": [2.0, 100]}),
    entry({"-4": [2.0, 100]}),
    entry({"٤": [2.0, 100]}),
    entry({"4": [0, 100]}),
    entry({"4": [-1.0, 100]}),
    entry({"4": ["2", 100]}),
    entry({"4": [True, 100]}),
    entry({"4": [2.0]}),
    entry({"4": [2.0, -1]}),
    entry({"4": [2.0, 1e300]}),
    entry({"4": [float("nan"), 0]}),
    entry({"4": [float("inf"), 0]}),
    entry({"4": [10**400, 0]}),
]


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_or_foreign_file_is_named_and_left_alone(tmp_path: Path, text: str):
    path = tmp_path / "gate.json"
    path.write_text(text)
    with pytest.raises(OptionError, match=r"gate\.json"):
        read(path)
    with pytest.raises(OptionError, match=r"gate\.json"):
        GateFile(path, "model", "here").save(measured())
    assert path.read_text() == text


def test_other_things_at_its_place_are_refused(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "bytes", "huge", "pipe"):
        with pytest.raises(OptionError, match=name):
            read(tmp_path / name)


def test_an_empty_file_is_an_empty_memory(tmp_path: Path):
    (tmp_path / "gate.json").write_text("\n")
    assert not read(tmp_path / "gate.json").is_known(4)
    GateFile(tmp_path / "gate.json", "model", "here").save(measured())
    assert read(tmp_path / "gate.json").is_known(4)


def test_a_writer_that_is_killed_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "gate.json"
    GateFile(path, "model", "here").save(measured())
    before = path.read_text()
    script = f"""
import os, signal
from coli.drafts.costs import RowCosts
from coli.drafts.gate_file import GateFile
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
costs = RowCosts()
costs.add(1, 0.01, 0)
costs.add(4, 0.09, 0)
GateFile(__import__("pathlib").Path({str(path)!r}), "model", "here").save(costs)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == before
    assert read(path).ratio(4) == pytest.approx(2.0, rel=0.05)
    GateFile(path, "model", "here").save(measured(3.0))
    assert read(path).ratio(4) == pytest.approx(3.0, rel=0.05)


def test_a_folder_that_cannot_be_written_is_an_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "replace", _full)
    with pytest.raises(OSError, match="full"):
        GateFile(tmp_path / "gate.json", "model", "here").save(measured())
    assert list(tmp_path.iterdir()) == []


def _full(source: object, target: object) -> None:
    raise OSError(28, "the disk is full")
