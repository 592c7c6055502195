"""What is opened follows from sizes, cache and file system, and the user hears about the cliff."""

import os
from pathlib import Path

import numpy as np
import pytest
from store.fake_records import RECORD_BYTES, FakeLayout, routes, write_records
from store.stores import consume

from coli.errors import MemoryBudgetError, OptionError
from coli.store import opening
from coli.store.expert_store import ExpertStore
from coli.store.opening import choose_mode, open_store
from coli.store.policy import OVERLAP, PoolSize
from coli.store.pools import plan_pools
from coli.store.record_files import IoMode

L, E, A = 5, 16, 4
CYCLE = L * A


def opened(
    layouts: dict[int, FakeLayout], records: float, notices: list[str] | None = None, **kwargs: object
) -> ExpertStore:
    return open_store(
        layouts,
        num_layers=L,
        num_experts=E,
        num_experts_per_tok=A,
        capacity_bytes=int(records * RECORD_BYTES),
        notice=(notices if notices is not None else []).append,
        **kwargs,  # type: ignore[arg-type]
    )


def run(store: ExpertStore, prefill: bool = False) -> None:
    for forward in routes(1, 6, L, E, A, rows=3):
        for layer_idx, expert_ids in enumerate(forward):
            assert sorted(consume(store, layer_idx, expert_ids, prefill)) == np.unique(expert_ids).tolist()


@pytest.mark.parametrize("io", ["auto", "mmap", "pread", "direct"])
@pytest.mark.parametrize("records", [1, 2, 10, OVERLAP + L, CYCLE + 1, L * E])
def test_every_budget_works_in_every_mode(tmp_path: Path, io: str, records: int) -> None:
    store = opened(write_records(tmp_path, L, E), records, io=io)
    run(store)
    run(store, prefill=True)
    stats = store.stats()
    assert stats.capacity_bytes <= records * RECORD_BYTES
    store.close()


@pytest.mark.parametrize("cap", [1, 2, 5, 100])
def test_cap_below_a_union_works_in_waves(tmp_path: Path, cap: int) -> None:
    store = opened(write_records(tmp_path, L, E), L * E, cap=cap)
    run(store)
    assert np.count_nonzero(store.residency, axis=1).max() <= cap
    store.close()


def test_below_one_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match="one record takes 4096"):
        opened(write_records(tmp_path, L, E), 0.99)


def test_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--io"):
        opened(write_records(tmp_path, L, E), 9, io="uring")


def test_the_cliff_is_named_once(tmp_path: Path) -> None:
    notices: list[str] = []
    layouts = write_records(tmp_path, L, E)
    opened(layouts, CYCLE, notices).close()
    assert notices == []
    opened(layouts, CYCLE - 1, notices).close()
    assert len(notices) == 1
    assert "5 layers x 4 experts" in notices[0]
    assert "finds 3.8 of its experts" in notices[0]


def test_auto_takes_views_when_all_is_cached_and_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [layout.path for layout in write_records(tmp_path, L, E).values()]
    monkeypatch.setattr(opening, "filesystem_type", lambda path: "ext4")
    assert choose_mode(paths, everything_fits=True) is IoMode.MMAP, "small"
    monkeypatch.setattr(opening, "_SMALL_BYTES", 0)
    monkeypatch.setattr(opening, "cached_share", lambda paths: 0.95)
    assert choose_mode(paths, everything_fits=True) is IoMode.MMAP
    assert choose_mode(paths, everything_fits=False) is IoMode.DIRECT
    monkeypatch.setattr(opening, "cached_share", lambda paths: 0.5)
    assert choose_mode(paths, everything_fits=True) is IoMode.DIRECT
    monkeypatch.setattr(opening, "filesystem_type", lambda path: "tmpfs")
    assert choose_mode(paths, everything_fits=False) is IoMode.MMAP


def test_cached_share_sees_the_page_cache(tmp_path: Path) -> None:
    paths = sorted({layout.path for layout in write_records(tmp_path, L, E).values()})
    for path in paths:
        path.read_bytes()
    assert opening.cached_share(paths) in (0.0, 1.0)  # 0 where the kernel does not say
    if opening.filesystem_type(tmp_path) in ("tmpfs", "ramfs"):
        return  # all there is of these files is in memory
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert opening.cached_share(paths) < 0.5


def test_usage_is_handed_over_once(tmp_path: Path) -> None:
    store = opened(write_records(tmp_path, L, E), L * E)
    run(store)
    store.settle(1)
    assert store.take_usage().sum() == (5 * 3 + 1) * L * A
    assert store.take_usage().sum() == 0
    store.close()


def test_places_are_shared_unless_cap_divides_them() -> None:
    sizes = dict.fromkeys(range(L), RECORD_BYTES)
    assert plan_pools(sizes, L, E, A, 18 * RECORD_BYTES).pool_sizes == (PoolSize(18),)
    for plan in (
        plan_pools(sizes, L, E, A, 18 * RECORD_BYTES, per_layer=True),
        plan_pools(sizes, L, E, A, 40 * RECORD_BYTES, cap=2),
    ):
        assert plan.per_layer
        assert plan.pool_sizes == tuple(PoolSize(2, OVERLAP) for _ in range(L))
        assert plan.nbytes <= plan.capacity_bytes


def test_record_sizes_get_pools_by_their_share() -> None:
    sizes = {0: 4096, 1: 4096, 3: 8192}
    plan = plan_pools(sizes, 4, E, A, 40 * 4096, pinned=(0, 3 * E))
    assert plan.pool_of_layer == (0, 0, None, 1)
    assert plan.nbytes <= 40 * 4096
    assert plan.slots_of_size[4096] == plan.pool_sizes[0].slots + 1
    assert plan.slots_of_size[8192] == plan.pool_sizes[1].slots + 1
    everything = plan_pools(sizes, 4, E, A, 10**9)
    assert everything.everything
    assert everything.slots_of_size == {4096: 2 * E, 8192: E}
