"""Philox4x32-10 (Salmon et al., SC 2011) for 16 neighbouring blocks at once, in LLVM IR; noise.py says what for."""

from llvmlite import ir
from numba import types

from coli.kernels.simd import I32, I64, VI, Lanes, V, const, op, pointer, reduce_lanes, splat, store


def _emit(_context, b, block, position, seed, out):
    wide, low, half = V(I64, 16), const(V(I64, 16), 0xFFFFFFFF), const(I64, 32)
    count = ir.Constant(wide, list(range(16)))
    c0 = b.and_(b.add(splat(b, block, wide), count), low)
    c1, c2 = b.and_(splat(b, position, wide), low), splat(b, b.lshr(position, half), wide)
    c3 = const(wide, 0)
    k0, k1 = b.and_(splat(b, seed, wide), low), splat(b, b.lshr(seed, half), wide)
    for _ in range(10):
        p0, p1 = b.mul(c0, const(wide, 0xD2511F53)), b.mul(c2, const(wide, 0xCD9E8D57))
        c0, c1 = b.xor(b.xor(b.lshr(p1, const(wide, 32)), c1), k0), b.and_(p1, low)
        c2, c3 = b.xor(b.xor(b.lshr(p0, const(wide, 32)), c3), k1), b.and_(p0, low)
        k0 = b.and_(b.add(k0, const(wide, 0x9E3779B9)), low)
        k1 = b.and_(b.add(k1, const(wide, 0xBB67AE85)), low)
    words = [b.trunc(c, VI) for c in (c0, c1, c2, c3)]
    biased = [Lanes(b, word) ^ -0x80000000 for word in words]  # so that signed comparisons order them
    top = biased[0]
    for x in biased[1:]:
        top = x.where(x > top, top)
    for k, word in enumerate(words):
        store(b, word, pointer(b, out), 64 * k)
    return b.xor(reduce_lanes(top, lambda p, q: p.where(p > q, q)).v, const(I32, -0x80000000))


# Words of 16 neighbouring blocks: word k of block + j goes to out + 64 * k + 4 * j. Returns the largest, as int32 bits.
philox16 = op(_emit, types.int32, types.int64, types.int64, types.int64, types.int64)
