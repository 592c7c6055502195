"""Rotary position embedding: frequency tables in float64, rotation of q and k in float32.

Frequencies: inv_freq[i] = theta**(-2i / dim). Scalings (formulas of the papers, as the published models use them):
  linear   inv_freq / factor                                                          (Chen et al., 2306.15595)
  llama3   by wavelength w = 2 pi / inv_freq: kept where w < old / high, divided by factor where w > old / low, between
           them interpolated with s = (old / w - low) / (high - low)                  (Llama 3.1 configuration)
  longrope inv_freq / one factor for each dimension: a short list within the original context, a long one beyond it
                                                                                      (Ding et al., 2402.13753)
  yarn     ramp between kept and divided over the dimensions that turn beta_fast .. beta_slow times in the original
           context; cos and sin are multiplied by attention_factor = 0.1 ln(factor) + 1   (Peng et al., 2309.00071)
Angles are position * inv_freq in float64; cos and sin are rounded once to float32.
"""

import numpy as np

from coli.kernels.elementwise import EXP64, LOG64, evaluate
from coli.kernels.ops import (
    cos64,
    fma,
    fma_f32,
    fmul,
    fsub,
    load_f32,
    load_f64,
    load_i64,
    load_part,
    sin64,
    splat_f32,
    store_f32,
    store_part,
)
from coli.kernels.runtime import Stage, address, arguments, unpacker

unpack4, unpack8 = unpacker(4), unpacker(8)

PI = 3.141592653589793


def log(x: float) -> float:
    """Natural logarithm by our own log64, so that tables do not depend on libm."""
    return float(evaluate(LOG64, np.array([x]))[0])


def inv_freq(theta: float, dim: int) -> np.ndarray:
    """theta**(-2i/dim) for i < dim/2: float64 (dim/2,)."""
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    return evaluate(EXP64, exponents * -log(theta))


def scale_linear(freq: np.ndarray, factor: float) -> np.ndarray:
    return freq / factor


def scale_llama3(
    freq: np.ndarray, factor: float, low_freq_factor: float, high_freq_factor: float, original: int
) -> np.ndarray:
    """`original` is original_max_position_embeddings."""
    turns = original * freq / (2 * PI)  # how often a dimension turns within the original context
    smooth = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return (1.0 - smooth) * freq / factor + smooth * freq


def scale_yarn(
    freq: np.ndarray,
    theta: float,
    factor: float,
    original: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> np.ndarray:
    """freq is inv_freq(theta, dim). `truncate`: the bounds of the ramp are rounded outwards to whole dimensions."""
    half = len(freq)

    def dimension(turns: float) -> float:
        return half * log(original / (turns * 2 * PI)) / log(theta)

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0.0), min(high, 2 * half - 1.0)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(half) - low) / (high - low), 0.0, 1.0)
    return freq / factor * ramp + freq * (1.0 - ramp)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 * mscale * ln(factor) + 1, or 1 for factor <= 1: yarn's attention factor."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * log(factor) + 1.0


def _rope_table(args, part, parts):
    """args: positions, rows, inv_freq (tables, half), half, factors (tables), cos, sin, table of each row or 0."""
    positions, rows, freqs, half = unpack4(args, 0)
    factors, cosine, sine, tables = unpack4(args, 4)
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        position = np.float64(load_i64(positions + 8 * s))
        table = load_i64(tables + 8 * s) if tables != 0 else 0
        freq, factor = freqs + 8 * table * half, load_f64(factors + 8 * table)
        for i in range(half):
            angle = position * load_f64(freq + 8 * i)
            store_f32(cosine + 4 * (s * half + i), np.float32(cos64(angle) * factor))
            store_f32(sine + 4 * (s * half + i), np.float32(sin64(angle) * factor))


ROPE_TABLE = Stage(_rope_table)


def _apply_rope(args, part, parts):
    """args: x, rows, stride, heads, head_dim, half, cos, sin, interleaved."""
    x, rows, stride, heads, head_dim, half, cosine, sine = unpack8(args, 0)
    interleaved = load_i64(args + 64)
    for s in range(rows * part // parts, rows * (part + 1) // parts):
        for h in range(heads):
            head = x + 4 * (s * stride + h * head_dim)
            if interleaved:
                for i in range(half):
                    c, t = load_f32(cosine + 4 * (s * half + i)), load_f32(sine + 4 * (s * half + i))
                    a, b = load_f32(head + 8 * i), load_f32(head + 8 * i + 4)
                    store_f32(head + 8 * i, fma_f32(a, c, -(b * t)))
                    store_f32(head + 8 * i + 4, fma_f32(b, c, a * t))
            else:
                for i in range(0, half, 16):
                    n = half - i
                    c, t = load_part(cosine + 4 * (s * half + i), n), load_part(sine + 4 * (s * half + i), n)
                    a, b = load_part(head + 4 * i, n), load_part(head + 4 * (half + i), n)
                    minus = fsub(splat_f32(np.float32(-0.0)), fmul(b, t))
                    store_part(head + 4 * i, fma(a, c, minus), n)
                    store_part(head + 4 * (half + i), fma(b, c, fmul(a, t)), n)


APPLY_ROPE = Stage(_apply_rope)


def rope_table(
    positions: np.ndarray,
    freq: np.ndarray,
    attention_factor: float | np.ndarray = 1.0,
    tables: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """positions int64 (S,), freq float64 (rot/2,) -> cos, sin float32 (S, rot/2), times attention_factor.

    freq (n, rot/2) and attention_factor (n,): row s takes those number tables[s], int64 (S,)."""
    assert positions.dtype == np.int64
    assert freq.dtype == np.float64
    positions, freq = np.ascontiguousarray(positions), np.ascontiguousarray(freq)
    half = freq.shape[-1]
    factors = np.array(attention_factor, np.float64, ndmin=1)
    assert tables is None or (tables.dtype == np.int64 and len(tables) == len(positions))
    cosine = np.empty((len(positions), half), np.float32)
    sine = np.empty_like(cosine)
    block = arguments(
        address(positions), len(positions), address(freq), half, address(factors),
        address(cosine), address(sine), 0 if tables is None else address(tables),
    )  # fmt: skip
    ROPE_TABLE.run(block)
    return cosine, sine


def apply_rope(
    x: np.ndarray,
    column: int,
    heads: int,
    head_dim: int,
    rot_dim: int,
    cosine: np.ndarray,
    sine: np.ndarray,
    interleaved: bool = False,
    threads: int = 1,
) -> None:
    """Rotate, in place, the first rot_dim values of each head of x[:, column : column + heads*head_dim].

    Pairs are (i, i + rot_dim/2), or (2i, 2i+1) when interleaved; cosine and sine (S, rot_dim/2) from `rope_table`."""
    assert x.dtype == np.float32
    assert x.strides[1] == 4
    assert cosine.shape == sine.shape == (len(x), rot_dim // 2)
    block = arguments(
        address(x) + 4 * column, len(x), x.strides[0] // 4, heads, head_dim, rot_dim // 2,
        address(cosine), address(sine), int(interleaved),
    )  # fmt: skip
    APPLY_ROPE.run(block, threads)
