"""The budget covers everything, refuses with its arithmetic, and is watched while running."""

import re

import pytest

from coli.errors import MemoryBudgetError
from coli.store.limits import MemoryLevel, ProcessMemory
from coli.store.memory import MemoryGuard, MemoryNeeds, plan_memory

GB = 10**9
PROCESS = ProcessMemory(200_000_000, 100_000_000)
NEEDS = MemoryNeeds(1 * GB, GB // 2, GB // 4)


def level(room: int, limit: int = 6 * GB, source: str = "memory.max of cgroup /a") -> MemoryLevel:
    return MemoryLevel(source, limit, limit - room)


def plan(ram: int | None, room: int, smallest: int = GB // 10, everything: int = 16 * GB, needs: MemoryNeeds = NEEDS):  # type: ignore[no-untyped-def]
    levels = [level(room), level(20 * GB, 24 * GB, "the machine")]
    return plan_memory(
        needs, ram=ram, smallest_experts_bytes=smallest, all_experts_bytes=everything, levels=levels, process=PROCESS
    )


def test_auto_fills_the_tightest_limit_and_leaves_a_reserve() -> None:
    made = plan(None, 6 * GB)
    assert made.source == "memory.max of cgroup /a"
    taken = NEEDS.dense_bytes + NEEDS.kv_bytes + NEEDS.working_bytes + made.slack_bytes + made.experts_bytes
    assert 6 * GB - taken == pytest.approx(0.04 * 6 * GB, abs=1)
    assert made.budget_bytes == taken + made.process_bytes


def test_experts_get_no_more_than_there_are() -> None:
    assert plan(None, 6 * GB, everything=GB).experts_bytes == GB


def test_ram_is_the_whole_process() -> None:
    made = plan(4 * GB, 6 * GB)
    assert made.budget_bytes == 4 * GB
    assert made.experts_bytes == 4 * GB - 300_000_000 - 1_750_000_000 - made.slack_bytes


@pytest.mark.parametrize("beyond", [0, 1, 4_999_999, 5_000_000, 9_999_999])
def test_the_budget_that_is_said_to_be_enough_is_enough(beyond: int) -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        plan(1 * GB, 6 * GB, smallest=GB // 10 + beyond)
    (enough,) = re.findall(r"--ram ([\d.]+) or more", str(caught.value))
    assert plan(round(float(enough) * GB), 6 * GB, smallest=GB // 10 + beyond).experts_bytes >= GB // 10 + beyond


def test_a_budget_below_the_needs_is_refused_with_the_sum() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        plan(2 * GB, 6 * GB)
    line = str(caught.value)
    for part in ("2.00 GB (--ram)", "300 MB process", "1.00 GB dense weights", "500 MB KV cache", "at least 100 MB"):
        assert part in line
    assert "--ram 2.32 or more is needed" in line
    assert "\n" not in line
    assert plan(2_310_000_000, 6 * GB).experts_bytes >= GB // 10


def test_mapped_corpora_come_out_of_the_budget() -> None:
    plain, mapped = plan(4 * GB, 6 * GB), plan(4 * GB, 6 * GB, needs=MemoryNeeds(1 * GB, GB // 2, GB // 4, 64_000_000))
    assert mapped.experts_bytes == plain.experts_bytes - 64_000_000
    assert "64 MB corpora and graphs" in mapped.arithmetic()


def test_auto_that_cannot_fit_is_refused() -> None:
    with pytest.raises(MemoryBudgetError, match=r"memory.max of cgroup /a.*free some memory"):
        plan(None, GB)


def test_ram_above_what_the_limit_leaves_is_refused() -> None:
    with pytest.raises(MemoryBudgetError, match=r"memory.max of cgroup /a leaves 4.00 GB: lower --ram to 4.30 GB"):
        plan(8 * GB, 4 * GB)


def test_ram_above_the_limit_is_fine_when_the_model_is_small() -> None:
    assert plan(8 * GB, 4 * GB, everything=GB).experts_bytes == GB


def test_a_system_that_does_not_say_wants_ram() -> None:
    with pytest.raises(MemoryBudgetError, match="give --ram"):
        plan_memory(NEEDS, ram=None, smallest_experts_bytes=0, all_experts_bytes=0, levels=[], process=PROCESS)
    made = plan_memory(NEEDS, ram=8 * GB, smallest_experts_bytes=0, all_experts_bytes=GB, levels=[], process=PROCESS)
    assert made.experts_bytes == GB


def test_guard_looks_every_two_seconds_and_asks_for_the_missing_room() -> None:
    now, room = [0.0], [GB]
    guard = MemoryGuard(lambda: [level(room[0])], lambda: now[0])
    now[0] = 3.0
    assert guard.excess()[0] == 0
    room[0] = 10_000_000
    now[0] = 4.0
    assert guard.excess()[0] == 0
    now[0] = 6.0
    excess, source = guard.excess()
    assert excess == 86_000_000
    assert source == "memory.max of cgroup /a"


def test_guard_sees_a_limit_lowered_below_the_use() -> None:
    now = [0.0]
    guard = MemoryGuard(lambda: [MemoryLevel("x", 2 * GB, 3 * GB)], lambda: now[0])
    now[0] = 3.0
    assert guard.excess()[0] == GB + 96_000_000
