"""The probes of `coli bench` do the work they claim."""

import numpy as np

from coli.kernels import probe
from coli.kernels.runtime import address, arguments


def test_every_block_is_read_once_for_each_pass():
    memory = np.arange(40 * 64, dtype=np.int32)
    out = np.zeros((3, 16), np.int32)
    probe.READ.run(arguments(address(memory), memory.nbytes // probe.BLOCK, 2, address(out)), 3)
    assert np.array_equal(out.sum(axis=0), 2 * memory.reshape(-1, 16).sum(axis=0))


def test_every_turn_multiplies_all_chains_and_steps():
    weights = np.arange(64, dtype=np.uint8) % 16
    x = np.full(probe.STEPS * probe.CHAINS + 1, 0x01010101, np.int32)
    out = np.zeros((2, 16), np.int32)
    turns = 5
    probe.MULTIPLY.run(arguments(address(weights), address(x), turns, address(out)), 2)
    rows = weights.reshape(16, 4).sum(axis=1).astype(np.int32)
    expected = np.sort(turns * probe.STEPS * probe.CHAINS * rows)
    assert all(np.array_equal(np.sort(part), expected) for part in out)


def test_rates_are_positive_and_finite():
    assert 0 < probe.read_bandwidth(1, 1 << 20, 1) < 1e13
    assert 0 < probe.integer_rate(1, 1) < 1e14
