"""The measuring script runs: a table row per prompt and gate, the same ids, and the cost table."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import measure_gate  # noqa: E402

DEMO = ROOT / "coli" / "data" / "demo"


def test_both_tables_come_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--no-smol", "--only", "wrong", "--rounds", "1", "--tokens", "24"]
    monkeypatch.setattr(sys, "argv", ["measure_gate.py", str(DEMO), *short])
    assert measure_gate.main() == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| demo")]
    assert len(rows) == 2
    assert not any("other ids" in row for row in rows)
    monkeypatch.setattr(sys, "argv", ["measure_gate.py", "--cost", "--rounds", "1", str(DEMO)])
    assert measure_gate.main() == 0
    assert "distinct experts a layer (4 of 32)" in capsys.readouterr().out


def test_what_has_no_time_left_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    late = ["--no-smol", "--only", "wrong", "--minutes", "0"]
    monkeypatch.setattr(sys, "argv", ["measure_gate.py", str(DEMO), *late])
    assert measure_gate.main() == 0
    assert "out of time: demo, resident, wrong grammar" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "last"),
    [
        (["--never-slower", "third", "--only", "wrong", "--cpu", "--gate", "auto"], "worst of `auto`: "),
        (["--merged", "--only", "code"], "log line, 1 rounds: merged over "),
    ],
)
def test_the_lists_of_one_model_end_in_a_verdict(
    flags: list[str], last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["measure_gate.py", str(DEMO), *flags, "--rounds", "1", "--tokens", "16"])
    assert measure_gate.main() == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(last)
