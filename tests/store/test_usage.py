"""The usage history: never of another model, never half written, decaying, and pins only where they pay."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from coli.errors import OptionError
from coli.store.pins import choose_pins, held_out_coverage, most_used, pinned_experts
from coli.store.usage import HALF_LIFE_SELECTIONS, UsageFile, UsageHistory, read_history

L, E, A = 6, 32, 4
RECORD = 100_000_000
RECORDS = dict.fromkeys(range(L), RECORD)


def counts(seed: int, tokens: int, skew: float, of: int = 0) -> np.ndarray:
    """Selections (L, E) of `tokens` tokens; skew 0 is uniform; `of` picks the favourites."""
    weight = (1.0 / np.arange(1, E + 1)) ** skew
    rng = np.random.default_rng(seed)
    favourite = np.random.default_rng([99, of])
    return np.stack([rng.multinomial(tokens * A, favourite.permutation(weight / weight.sum())) for _ in range(L)])


def history(turns: int, tokens: int, skew: float) -> UsageHistory:
    made = UsageHistory("f", L, E)
    for turn in range(turns):
        made.add(counts(turn, tokens, skew))
    return made


def test_an_absent_or_empty_file_is_an_empty_history(tmp_path: Path) -> None:
    path = tmp_path / "usage.json"
    assert read_history(path, "f", L, E).selections == 0
    path.write_text("")
    assert read_history(path, "f", L, E).selections == 0


def test_what_is_saved_is_read_back_and_added_up(tmp_path: Path) -> None:
    file = UsageFile(tmp_path / "new" / "usage.json", "f", L, E, decay=1.0)
    turn = counts(1, 50, 1.0)
    for _ in range(3):
        file.save(turn)
    assert np.array_equal(file.read().counts, 3 * turn)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["usage.json"]


def test_a_link_to_the_history_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "usage.json"
    link.symlink_to(tmp_path / "elsewhere" / "mine.json")
    for _ in "ab":
        UsageFile(link, "f", L, E).save(np.ones((L, E), np.int64))
    assert link.is_symlink()
    assert read_history(tmp_path / "elsewhere" / "mine.json", "f", L, E).selections == pytest.approx(
        2 * L * E, rel=1e-3
    )
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["mine.json"]


def test_turns_go_to_the_lighter_half() -> None:
    made = UsageHistory("f", L, E)
    for turn in range(4):
        made.add(counts(turn, 50, 1.0), decay=1.0)
    assert made.halves[0].sum() == made.halves[1].sum() == 2 * 50 * A * L


def test_old_counts_lose_half_their_weight_in_a_half_life() -> None:
    made = UsageHistory("f", 1, 2)
    made.add(np.array([[100, 0]]))
    made.add(np.array([[0, HALF_LIFE_SELECTIONS]]))
    assert made.counts[0, 0] == pytest.approx(50)


@pytest.mark.parametrize(
    ("fingerprint", "layers", "experts", "message"),
    [("other", L, E, "another model"), ("f", L + 1, E, "expected a history of 7 layers"), ("f", L, 16, "found 6 x 32")],
)
def test_another_model_is_refused_by_name(
    tmp_path: Path, fingerprint: str, layers: int, experts: int, message: str
) -> None:
    path = tmp_path / "usage.json"
    UsageFile(path, "f", L, E).save(counts(1, 10, 1.0))
    with pytest.raises(OptionError, match=message) as caught:
        read_history(path, fingerprint, layers, experts)
    assert str(path) in str(caught.value)
    with pytest.raises(OptionError):
        UsageFile(path, fingerprint, layers, experts).save(np.ones((layers, experts), np.int64))


def test_a_file_the_user_names_may_come_from_another_model_of_equal_shape(tmp_path: Path) -> None:
    path = tmp_path / "usage.json"
    UsageFile(path, "f", L, E).save(counts(1, 10, 1.0))
    assert read_history(path, "other", L, E, any_model=True).selections > 0
    with pytest.raises(OptionError, match="expected a history"):
        read_history(path, "other", L, E + 1, any_model=True)


def test_text_of_other_engines_is_read_when_named(tmp_path: Path) -> None:
    path = tmp_path / "stats.txt"
    path.write_text(f"-1 {L} {E}\n-2 3 1a2b\n0 5 17\n\n2 31 4\n0 5 3\n")
    made = read_history(path, "f", L, E, any_model=True)
    assert (made.counts[0, 5], made.counts[2, 31], made.selections) == (20, 4, 24)
    with pytest.raises(OptionError, match="not a usage history of coli"):
        read_history(path, "f", L, E)
    path.write_text(f"-1 {L} {E}\n0 {E} 1\n")
    with pytest.raises(OptionError, match="line 2: no expert 32 of layer 0"):
        read_history(path, "f", L, E, any_model=True)


@pytest.mark.parametrize("text", ["{", "{}", '{"format": 3}', "[1, 2", '{"halves": "x"}', "\x00\x01", "1 2"])
@pytest.mark.parametrize("any_model", [False, True])
def test_damaged_files_are_one_line(tmp_path: Path, text: str, any_model: bool) -> None:
    path = tmp_path / "usage.json"
    path.write_text(text)
    with pytest.raises(OptionError) as caught:
        read_history(path, "f", L, E, any_model=any_model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [-1.0, float("inf"), float("nan"), 10**400, 1e300, None])
def test_impossible_counts_are_refused(tmp_path: Path, bad: float) -> None:
    path = tmp_path / "usage.json"
    data = json.loads(history(2, 10, 1.0).dump())
    data["halves"][0][1][2] = bad
    path.write_text(json.dumps(data))
    with pytest.raises(OptionError, match="damaged"):
        read_history(path, "f", L, E)


@pytest.mark.parametrize("any_model", [False, True])
def test_a_file_that_is_no_file_is_neither_read_nor_replaced(tmp_path: Path, any_model: bool) -> None:
    path = tmp_path / "usage.json"
    os.mkfifo(path)
    with pytest.raises(OptionError, match="not a regular file"):
        read_history(path, "f", L, E, any_model=any_model)
    with pytest.raises(OptionError, match="not a regular file"):
        UsageFile(path, "f", L, E).save(np.ones((L, E), np.int64))
    assert path.is_fifo()


@pytest.mark.parametrize("text", ['{"a":' + "[" * 200_000, "0 0 " + "9" * 400, "x\n" * 5000, "0 0 -4"])
def test_hostile_files_are_a_short_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "usage.json"
    path.write_text(text)
    with pytest.raises(OptionError) as caught:
        read_history(path, "f", L, E, any_model=True)
    assert len(str(caught.value)) < len(str(path)) + 250


WRITER = """
import sys
from pathlib import Path
import numpy as np
from coli.store.usage import UsageFile
file = UsageFile(Path(sys.argv[1]), "f", 40, 128)
print("ready", flush=True)
while True:
    file.save(np.ones((40, 128), np.int64))
    print("saved", flush=True)
"""


@pytest.mark.parametrize("saves", [1, 3])
def test_killed_while_writing_leaves_a_whole_history(tmp_path: Path, saves: int) -> None:
    path = tmp_path / "usage.json"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(1 + saves):
            writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
    assert read_history(path, "f", 40, 128).selections >= saves * 40 * 128 * 0.9
    UsageFile(path, "f", 40, 128).save(np.ones((40, 128), np.int64))


def test_most_used_fills_the_budget_by_use_per_byte() -> None:
    use = np.zeros((2, 3))
    use[0] = [5, 9, 0]
    use[1] = [8, 1, 30]
    sizes = {0: 10, 1: 20}
    assert most_used(use, sizes, 45) == ((0, 1, 5), 40)
    assert most_used(use, sizes, 10**9)[0] == (0, 1, 3, 4, 5)


def test_uniform_use_pins_nothing() -> None:
    for tokens in (100, 2000, 50_000):
        assert choose_pins(history(6, tokens, 0.0), RECORDS, A, L * E * RECORD // 2).keys == ()


def test_a_habit_that_does_not_last_pins_nothing() -> None:
    made = UsageHistory("f", L, E)
    for turn in range(2):
        made.add(counts(turn, 5000, 2.0, of=turn))
    covered, chance, _ = held_out_coverage(made, RECORDS, A, 40 * RECORD)
    assert covered < 2 * chance
    made = UsageHistory("f", L, E)
    made.add(counts(1, 50_000, 2.0))
    assert choose_pins(made, RECORDS, A, L * E * RECORD // 2).keys == (), "one turn has nothing to be judged on"


def test_lasting_skew_is_pinned_within_its_share() -> None:
    capacity = L * E * RECORD // 2
    choice = choose_pins(history(6, 3000, 1.2), RECORDS, A, capacity)
    assert choice.keys
    assert choice.nbytes == len(choice.keys) * RECORD <= capacity // 2
    assert "held-out" in choice.reason


def test_young_histories_get_a_small_share() -> None:
    capacity = L * E * RECORD // 2
    young, old = (choose_pins(history(4, tokens, 1.2), RECORDS, A, capacity) for tokens in (1000, 4000))
    assert 0 < young.nbytes < old.nbytes


def test_pins_never_take_the_memory_of_the_cycle() -> None:
    cycle = L * A * RECORD
    made = history(6, 3000, 1.2)
    assert choose_pins(made, RECORDS, A, cycle).keys == ()
    choice = choose_pins(made, RECORDS, A, 2 * cycle)
    assert choice.nbytes <= cycle // 2
    assert choose_pins(made, RECORDS, A, L * E * RECORD).reason == "no pins: every expert fits"


def test_explicit_pins_are_obeyed_within_the_budget(tmp_path: Path) -> None:
    capacity = L * E * RECORD // 2
    uniform = history(2, 100, 0.0)

    def asked(pin: str | Path, pin_bytes: float | None, autopin: bool = True) -> int:
        return pinned_experts(uniform, RECORDS, A, capacity, pin=pin, pin_bytes=pin_bytes, autopin=autopin).nbytes

    assert asked("off", math.inf) == 0
    assert asked("auto", None) == 0
    assert asked("auto", 5 * RECORD) == 5 * RECORD
    assert asked("auto", 5 * RECORD, autopin=False) == 5 * RECORD
    assert asked("auto", None, autopin=False) == 0
    assert capacity - 9 * RECORD < asked("auto", math.inf) <= capacity - 8 * RECORD
    path = tmp_path / "named.json"
    path.write_text(UsageHistory("other", L, E).dump())
    assert asked(path, math.inf) == 0
    path.write_text(history(2, 100, 1.0).dump())
    assert asked(path, None) == capacity // 2
    with pytest.raises(OptionError, match="--pin"):
        asked(tmp_path / "absent", None)
