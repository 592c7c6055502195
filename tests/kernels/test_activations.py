"""Quantizing rows once and packing them later gives the very bytes of quantizing while packing."""

import naive
import numpy as np
import pytest

from coli.kernels import activations
from coli.kernels.matmul import KIND_F32, KIND_Q4, KIND_Q8


def rows(count: int = 21, cols: int = 80) -> np.ndarray:
    return np.random.default_rng(5).standard_normal((count, cols)).astype(np.float32)


def quantized(x: np.ndarray, threads: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    groups = -(-x.shape[1] // 32)
    q, scale = np.empty((len(x), 32 * groups), np.int8), np.empty((len(x), groups), np.float32)
    total = np.empty((len(x), groups), np.int32)
    activations.quantize_rows(x, q, scale, total, threads)
    return q, scale, total


@pytest.mark.parametrize("threads", [1, 2])
def test_quantize_rows_equals_the_slow_twin(threads):
    x = rows()
    x[3] *= 1e-32
    x[4] *= 1e38
    q, scale, total = quantized(x, threads)
    for s in range(len(x)):
        for g, group in enumerate(naive.pad_groups(x[s]).reshape(-1, 32)):
            values, factor = naive.quantize_group(group)
            assert np.array_equal(q[s, 32 * g : 32 * g + 32], values)
            assert scale[s, g] == factor
            assert total[s, g] == values.sum()


@pytest.mark.parametrize("kind", [KIND_Q4, KIND_Q8])
@pytest.mark.parametrize("count", [1, 5, 16, 17, 33, 50])
def test_pack_quantized_gives_the_bytes_of_pack_rows(kind, count):
    x, groups = rows(), 3
    ids = np.random.default_rng(count).integers(0, len(x), count)
    direct, later = (np.zeros(activations.x_bytes(kind, count, groups), np.uint8) for _ in range(2))
    activations.pack_rows(x, ids, kind, direct)
    blocks = np.array([[0, count, kind, 0]], np.int64)
    activations.pack_quantized(*quantized(x), ids, blocks, later, 2)
    assert np.array_equal(direct, later)


def test_packed_float_rows_are_padded_copies():
    x = rows(6, 40)
    buffer = np.full(activations.x_bytes(KIND_F32, 4, 2), 255, np.uint8)
    activations.pack_rows(x, np.array([5, 0, 0, 2]), KIND_F32, buffer)
    packed = buffer.view(np.float32).reshape(4, 64)
    assert np.array_equal(packed[:, :40], x[[5, 0, 0, 2]])
    assert not packed[:, 40:].any()


def test_rows_of_a_wider_buffer_are_read_by_their_stride():
    wide = rows(8, 120)
    x = wide[:, 30:110]
    a, b = (np.zeros(activations.x_bytes(KIND_Q8, 8, 3), np.uint8) for _ in range(2))
    activations.pack_rows(x, np.arange(8), KIND_Q8, a)
    activations.pack_rows(np.ascontiguousarray(x), np.arange(8), KIND_Q8, b)
    assert np.array_equal(a, b)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_group_is_marked_by_its_scale(value):
    x = rows(2, 64)
    x[1, 40] = value
    q, scale, total = quantized(x)
    assert np.isnan(scale[1, 1])
    assert np.isfinite(np.delete(scale.ravel(), 3)).all()
    assert not q[1, 32:].any()
    assert total[1, 1] == 0
