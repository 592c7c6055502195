"""The inner loop of the quantized matmul, emitted as one block of LLVM IR.

One call computes a tile of 16 rows x n activation vectors (n = 1..16) over all of K:

    acc[s] = 0                                                (16 lanes = 16 rows)
    for every group g of 32 k, in order:
        dot[s] = sum over the group of (w - zero) * x[s]      exact, int32
        acc[s] = fma(float(dot[s]), wscale * xscale[s], acc[s])

This is the whole numerical contract: the integer part is exact, hence the same on every instruction set and in any
order; there is one rounding of wscale * xscale and one fma per group in the order of k. n, tiling, threads and
instruction set cannot change a bit. Layouts: matmul.py (weights) and activations.py (records of a block of n vectors).

One intrinsic holds the whole loop: accumulators are phi nodes, unpacked weights of a group stay in registers while all
vectors use them, and LLVM keeps close to the order in which we emit.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from coli.kernels.runtime import Routine, caller
from coli.kernels.simd import (
    F32,
    I8,
    I16,
    I32,
    I64,
    VB,
    VF,
    VI,
    V,
    call,
    const,
    features,
    half_to_float,
    has_half,
    ir_fma,
    load,
    plus,
    pointer,
    shuffle,
    splat,
    store,
    undef,
)

ROWS, GROUP, NMAX = 16, 32, 16
XREC = GROUP + 8  # bytes of an activation record per vector and group
ZERO = {"q4": 8, "q8": 128}  # offset of the unsigned weights
WBYTES = {"q4": ROWS * GROUP // 2, "q8": ROWS * GROUP}  # per tile and group
PREFETCH = 8192  # how far ahead weights are prefetched, in bytes: the hardware does not run ahead of a slow consumer


# ------------------------------------------------------------- integer dot products
# prep(w)          64 weight bytes (unsigned; 16 rows x 4 k) -> what stays in registers
# start(corr)      fresh accumulator; corr: i32, the correction term
# step(a, w, x)    accumulate; x: i32 holding 4 int8 of one activation vector
# finish(a, corr)  -> <16 x i32>
# tile    activation vectors per loop over K (more than that: the loop is repeated)
# chunk   weight vectors (of the 8 in a group) unpacked at a time
# pair    activation vectors interleaved, to hide the latency of the accumulator chain
class Vnni512:
    """vpdpbusd on 512 bits with the activations broadcast straight from memory."""

    tile, chunk, pair = 16, 8, 2

    def __init__(self, b):
        self.b = b

    def prep(self, w):
        return w

    def start(self, corr):
        return splat(self.b, corr, VI)

    def step(self, a, w, x):
        x = self.b.bitcast(splat(self.b, x, VI), VB)
        return call(self.b, "llvm.x86.avx512.vpdpbusd.512", VI, a, w, x)

    def finish(self, a, corr):
        return a


class Vnni256:
    """vpdpbusd on 256 bits (AVX-VNNI); also the base of the AVX2 paths: 2 halves of 8 rows."""

    tile, chunk, pair = 4, 2, 4
    W8, W16, W32 = V(I8, 32), V(I16, 16), V(I32, 8)

    def __init__(self, b):
        self.b = b
        self.one = const(self.W16, 1)

    def prep(self, w):
        return [shuffle(self.b, w, undef(VB), range(h, h + 32)) for h in (0, 32)]

    def start(self, corr):
        return [splat(self.b, corr, self.W32)] * 2

    def step(self, a, w, x):
        x = self.b.bitcast(splat(self.b, x, self.W32), self.W8)
        return [self.half(p, q, x) for p, q in zip(a, w, strict=True)]

    def half(self, a, w, x):
        return call(self.b, "llvm.x86.avx512.vpdpbusd.256", self.W32, a, w, x)

    def finish(self, a, corr):
        return shuffle(self.b, a[0], a[1], range(16))

    def maddubs(self, u, s):
        return call(self.b, "llvm.x86.avx2.pmadd.ub.sw", self.W16, u, s)

    def pairs(self, m):
        return call(self.b, "llvm.x86.avx2.pmadd.wd", self.W32, m, self.one)


class Avx2Q4(Vnni256):
    """vpmaddubsw, summed in int16 over the group: at most 8 * 2 * 15 * 128 = 30720."""

    def start(self, corr):
        return [const(self.W16, 0)] * 2

    def half(self, a, w, x):
        return self.b.add(a, self.maddubs(w, x))

    def finish(self, a, corr):
        dot = super().finish([self.pairs(p) for p in a], corr)
        return self.b.add(dot, splat(self.b, corr, VI))


class Avx2Q8(Vnni256):
    """|w| * (x with the sign of w): 2 * 128 * 127 fits int16. (vpmaddubsw with the unsigned w would saturate.) Needs
    x >= -127, as vpsignb cannot negate -128. w is signed here, so there is nothing to correct."""

    chunk = 1

    def prep(self, w):
        no_poison = const(ir.IntType(1), 0)
        return [
            (call(self.b, "llvm.abs.v32i8", self.W8, h, no_poison), h)
            for h in super().prep(self.b.xor(w, const(VB, -128)))
        ]

    def start(self, corr):
        return [const(self.W32, 0)] * 2

    def half(self, a, w, x):
        mag, signed = w
        x = call(self.b, "llvm.x86.avx2.psign.b", self.W8, x, signed)
        return self.b.add(a, self.pairs(self.maddubs(mag, x)))


class GenericQ4:
    """Plain IR without shuffles: a 16-bit lane holds two neighbouring bytes, take the even and the odd one apart by
    shifts. The sum fits int16 as in Avx2Q4."""

    tile, chunk, pair = 4, 2, 1
    H = V(I16, 32)

    def __init__(self, b):
        self.b = b

    def even_odd(self, w, signed):
        b, eight = self.b, const(self.H, 8)
        w = b.bitcast(w, self.H)
        if signed:
            return b.ashr(b.shl(w, eight), eight), b.ashr(w, eight)
        return b.and_(w, const(self.H, 255)), b.lshr(w, eight)

    def products(self, w, x):
        xe, xo = self.even_odd(splat(self.b, x, VI), True)
        return self.b.add(self.b.mul(w[0], xe), self.b.mul(w[1], xo))

    def pairs(self, m):
        b, n = self.b, const(VI, 16)
        m = b.bitcast(m, VI)
        return b.add(b.ashr(b.shl(m, n), n), b.ashr(m, n))

    def prep(self, w):
        return self.even_odd(w, False)

    def start(self, corr):
        return const(self.H, 0)

    def step(self, a, w, x):
        return self.b.add(a, self.products(w, x))

    def finish(self, a, corr):
        return self.b.add(self.pairs(a), splat(self.b, corr, VI))


class GenericQ8(GenericQ4):
    """Signed w: 2 * 128 * 127 fits int16, the sum over more does not. x >= -127."""

    def prep(self, w):
        return self.even_odd(self.b.xor(w, const(VB, -128)), True)

    def start(self, corr):
        return const(VI, 0)

    def step(self, a, w, x):
        return self.b.add(a, self.pairs(self.products(w, x)))

    def finish(self, a, corr):
        return a


PATHS = {
    "avx512": (Vnni512, Vnni512),
    "avxvnni": (Vnni256, Vnni256),
    "avx2": (Avx2Q4, Avx2Q8),
    "generic": (GenericQ4, GenericQ8),
}


def select_path(context):
    found = features(context)
    if {"avx512vnni", "avx512bw"} <= found:
        return "avx512"
    return "avxvnni" if "avxvnni" in found else "avx2" if "avx2" in found else "generic"


# ------------------------------------------------------------------------- the loop
def low_nibbles(b, w):
    return b.and_(w, const(VB, 15))


def high_nibbles(b, w):
    h = b.lshr(b.bitcast(w, V(I16, 32)), const(V(I16, 32), 4))  # no 8-bit shifts on x86
    return b.and_(b.bitcast(h, VB), const(VB, 15))


def emit_loop(b, kind, dot, native_half, n, s0, m, wp, sp, xp, ng, out, ostride):
    """Rows of one tile x the m vectors from s0 of a block of n, over all groups.
    m is a Python int; n and s0 are i64 values (constants where the path allows it)."""
    wbytes = WBYTES[kind]
    entry, loop = b.block, b.append_basic_block(f"groups.{m}")
    done = b.append_basic_block(f"done.{m}")

    def scaled(x, k):
        return b.mul(x, const(I64, k)) if k != 1 else x

    xrec = scaled(n, XREC)
    xp = plus(b, xp, scaled(s0, GROUP))
    to_scale = b.add(scaled(n, GROUP), scaled(s0, 4 - GROUP))  # from there, in the record
    to_corr = b.add(to_scale, scaled(n, 4))
    b.branch(loop)
    b.position_at_end(loop)
    g = b.phi(I64)
    g.add_incoming(const(I64, 0), entry)
    acc = [b.phi(VF) for _ in range(m)]
    for phi in acc:
        phi.add_incoming(const(VF, 0.0), entry)
    wg, sg = plus(b, wp, scaled(g, wbytes)), plus(b, sp, scaled(g, 2 * ROWS))
    xg = plus(b, xp, b.mul(g, xrec))
    xscale, xcorr = plus(b, xg, to_scale), plus(b, xg, to_corr)

    ahead = [(wg, PREFETCH + i) for i in range(0, wbytes, 64)]
    ahead.append((sg, PREFETCH // wbytes * 2 * ROWS))
    for p, off in ahead:
        # read, into L1, data
        call(b, "llvm.prefetch.p0", ir.VoidType(), plus(b, p, off), const(I32, 0), const(I32, 3), const(I32, 1))

    corr = [load(b, xcorr, 4 * s, I32, 4) for s in range(m)]
    dots = [dot.start(c) for c in corr]
    for c0 in range(0, 8, dot.chunk):
        chunk, last = range(c0, c0 + dot.chunk), c0 + dot.chunk == 8
        if kind == "q4":  # 64 bytes: low nibbles = step 2i, high nibbles = step 2i + 1
            packed = {i: load(b, wg, 64 * i, VB) for i in sorted({j // 2 for j in chunk})}
            w = {j: (high_nibbles if j % 2 else low_nibbles)(b, packed[j // 2]) for j in chunk}
        else:
            w = {j: load(b, wg, 64 * j, VB) for j in chunk}
        w = {j: dot.prep(w[j]) for j in chunk}
        if last:
            scale = half_to_float(b, load(b, sg, 0, V(I16, 16)), native_half)
        for p0 in range(0, m, dot.pair):
            pair = range(p0, min(p0 + dot.pair, m))
            for j in chunk:
                for s in pair:
                    dots[s] = dot.step(dots[s], w[j], load(b, xg, s * GROUP + 4 * j, I32, 4))
            if last:
                for s in pair:
                    xs = splat(b, load(b, xscale, 4 * s, F32, 4), VF)
                    d = b.sitofp(dot.finish(dots[s], corr[s]), VF)
                    dots[s] = ir_fma(b, d, b.fmul(scale, xs), acc[s])

    g1 = b.add(g, const(I64, 1))
    g.add_incoming(g1, loop)
    for phi, x in zip(acc, dots, strict=True):
        phi.add_incoming(x, loop)
    b.cbranch(b.icmp_signed("<", g1, ng), loop, done)
    b.position_at_end(done)
    for s in range(m):
        store(b, dots[s], out, scaled(b.mul(ostride, b.add(s0, const(I64, s))), 4), 4)


def make_tile(kind):
    @intrinsic
    def tile(typingctx, n, w, ws, x, ng, out, ostride):
        """out[s*ostride + r] (f32) for s < n, r < 16, from the weight tile at w, its scales at ws and the activation
        block at x (byte addresses; ostride in elements). 1 <= n <= 16, ng >= 1."""

        def codegen(context, b, _sig, args):
            n, w, ws, x, ng, out, ostride = args
            wp, sp, xp, op = (pointer(b, a) for a in (w, ws, x, out))
            dot = PATHS[select_path(context)][kind == "q8"](b)
            half = has_half(context)
            # for (s0 = 0; s0 < n; s0 += dot.tile) switch (min(n - s0, dot.tile)) ...
            start, head = b.block, b.append_basic_block("vectors")
            latch, end = b.append_basic_block("next"), b.append_basic_block("end")
            b.branch(head)
            b.position_at_end(head)
            s0, size = b.phi(I64), const(I64, dot.tile)
            left = b.sub(n, s0)
            sw = b.switch(b.select(b.icmp_signed("<", left, size), left, size), latch)
            for m in range(1, dot.tile + 1):
                case = b.append_basic_block(f"n{m}")
                sw.add_case(const(I64, m), case)
                b.position_at_end(case)
                whole = dot.tile == NMAX  # then n = m and s0 = 0: constant displacements
                emit_loop(
                    b, kind, dot, half, const(I64, m) if whole else n, const(I64, 0) if whole else s0, m,
                    wp, sp, xp, ng, op, ostride,
                )  # fmt: skip
                b.branch(latch)
            b.position_at_end(latch)
            s1 = b.add(s0, size)
            s0.add_incoming(const(I64, 0), start)
            s0.add_incoming(s1, latch)
            b.cbranch(b.icmp_signed("<", s1, n), head, end)
            b.position_at_end(end)
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, i, i, i, i, i, i), codegen

    return tile


_tile_q4, _tile_q8 = make_tile("q4"), make_tile("q8")


def _run_tile(kind, n, w, ws, x, groups, out, stride):
    if kind == 1:
        _tile_q8(n, w, ws, x, groups, out, stride)
    else:
        _tile_q4(n, w, ws, x, groups, out, stride)


TILE = Routine(_run_tile, 8)
call_tile = caller(8)
