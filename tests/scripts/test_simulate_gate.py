"""The simulating script runs: a row per prompt, and what the drafting takes."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import simulate_gate  # noqa: E402


@pytest.mark.parametrize("drafting", [[], ["--drafting"]])
def test_recorded_answers_give_a_table(
    drafting: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = tmp_path / "answers.json"
    short = ["--tokens", "16", "--seeds", "1", "--answers", str(answers), *drafting]
    monkeypatch.setattr(sys, "argv", ["simulate_gate.py", *short])
    assert simulate_gate.main() == 0
    rows = capsys.readouterr().out.splitlines()
    assert any(row.startswith("| demo | near-miss corpus |") for row in rows)
    assert answers.exists()
