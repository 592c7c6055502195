"""The inner loop of the quantized matmul, emitted as one block of LLVM IR.

One call computes a tile of 16 rows x n activation vectors (n = 1..16) over all of K:

    acc[s] = 0                                                (16 lanes = 16 rows)
    for every group g of 32 k, in order:
        dot[s] = sum over the group of (w - zero) * x[s]      exact, int32 (mxfp4: twice the values of the codes)
        acc[s] = fma(float(dot[s]), wscale * xscale[s], acc[s])

This is the whole numerical contract: the integer part is exact, hence the same on every instruction set and in any
order; there is one rounding of wscale * xscale and one fma per group in the order of k. n, tiling, threads and
instruction set cannot change a bit. Layouts: matmul.py (weights) and activations.py (records of a block of n vectors).

Where registers are many, one loop over the groups serves up to 16 vectors; where they are few (16 of 256 bits), 6.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coli.kernels import assembly
from coli.kernels.dots import PATHS
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
    feature_text,
    features,
    half_to_float,
    has_half,
    ir_fma,
    load,
    plus,
    pointer,
    splat,
    store,
)
from coli.kernels.target import simd_path_of

ROWS, GROUP, NMAX = 16, 32, 16
XREC = GROUP + 8  # bytes of an activation record per vector and group
WBYTES = {"q4": ROWS * GROUP // 2, "q8": ROWS * GROUP, "mxfp4": ROWS * GROUP // 2}  # per tile and group
SCALE_BYTES = {"q4": 2, "q8": 2, "mxfp4": 1}  # of a row: float16, or the exponent of a power of two
KINDS = tuple(WBYTES)  # in the order of dots.PATHS
PREFETCH = 8192  # how far ahead weights are prefetched, in bytes: the hardware does not run ahead of a slow consumer
SPAN = 8


def low_nibbles(b, w):
    return b.and_(w, const(VB, 15))


def high_nibbles(b, w):
    h = b.lshr(b.bitcast(w, V(I16, 32)), const(V(I16, 32), 4))  # no 8-bit shifts on x86
    return b.and_(b.bitcast(h, VB), const(VB, 15))


def scaled(b, x, k):
    return b.mul(x, const(I64, k)) if k != 1 else x


def prefetch(b, p, write=False):
    """The line at the i8* p into the first-level cache."""
    call(b, "llvm.prefetch.p0", ir.VoidType(), p, const(I32, int(write)), const(I32, 3), const(I32, 1))


class Packed:
    """The weights of a tile as they are stored: unpacked in registers."""

    def __init__(self, b, kind, dot, native_half, wp, sp):
        self.b, self.kind, self.dot, self.native_half, self.wp, self.sp = b, kind, dot, native_half, wp, sp

    def at(self, g, ahead=True):
        """Go to group g (i64) and prefetch what lies ahead of it (always the scales, weights too if `ahead`)."""
        b, nbytes = self.b, WBYTES[self.kind]
        self.w, self.s = (
            plus(b, self.wp, scaled(b, g, nbytes)),
            plus(b, self.sp, scaled(b, g, SCALE_BYTES[self.kind] * ROWS)),
        )
        for i in range(0, nbytes if ahead else 0, 64):
            prefetch(b, plus(b, self.w, PREFETCH + i))
        prefetch(b, plus(b, self.s, PREFETCH // nbytes * SCALE_BYTES[self.kind] * ROWS))

    def chunk(self, steps):
        """What dot.prep makes of the weights of these steps (4 k each): step -> value."""
        b = self.b
        if self.kind != "q8":  # 64 bytes: low nibbles = step 2i, high nibbles = step 2i + 1
            packed = {i: load(b, self.w, 64 * i, VB) for i in sorted({j // 2 for j in steps})}
            w = {j: (high_nibbles if j % 2 else low_nibbles)(b, packed[j // 2]) for j in steps}
            if self.kind == "mxfp4":
                w = {j: self.dot.codes(codes) for j, codes in w.items()}
        else:
            w = {j: load(b, self.w, 64 * j, VB) for j in steps}
        return {j: self.dot.prep(w[j]) for j in steps}

    def scale(self):
        if self.kind == "mxfp4":
            return self.power_of_two()
        return half_to_float(self.b, load(self.b, self.s, 0, V(I16, 16)), self.native_half)

    def power_of_two(self):
        """2**(e - 127) of each byte e < 255: e is the exponent of a float32, and 2**-127 is the subnormal 0x400000."""
        b, least = self.b, const(VI, 0x400000)
        bits = b.shl(b.zext(load(b, self.s, 0, V(I8, 16)), VI), const(VI, 23))
        return b.bitcast(b.select(b.icmp_unsigned("<", bits, least), least, bits), VF)


def emit_groups(b, dot, weights, n, s0, m, xp, groups, outs):
    """The m vectors from s0 of a block of n, over `groups` groups whose records begin at xp.
    m is a Python int, n and s0 are i64 values; outs: where the m results go."""
    # Float accumulators are used once per group. That their addresses (outs) may alias for all LLVM knows keeps its
    # loads in the order in which they are emitted, which spills least.
    in_memory = dot.few and m > 2
    entry, loop = b.block, b.append_basic_block(f"groups.{m}")
    done = b.append_basic_block(f"done.{m}")
    record = scaled(b, n, XREC)
    xp = plus(b, xp, scaled(b, s0, GROUP))
    to_scale = b.add(scaled(b, n, GROUP), scaled(b, s0, 4 - GROUP))  # from there, in the record
    to_corr = b.add(to_scale, scaled(b, n, 4))
    if in_memory:
        for out in outs:
            store(b, const(VF, 0.0), out, 0, 4)
    b.branch(loop)
    b.position_at_end(loop)
    g = b.phi(I64)
    g.add_incoming(const(I64, 0), entry)
    phis = []
    if not in_memory:
        phis = [b.phi(VF) for _ in range(m)]
        for phi in phis:
            phi.add_incoming(const(VF, 0.0), entry)
    weights.at(g)
    xg = plus(b, xp, b.mul(g, record))
    xscale, xcorr = plus(b, xg, to_scale), plus(b, xg, to_corr)
    corr = [load(b, xcorr, 4 * s, I32, 4) for s in range(m)]
    dots = [dot.start(c) for c in corr]
    for c0 in range(0, 8, dot.chunk):
        steps, last = range(c0, c0 + dot.chunk), c0 + dot.chunk == 8
        w = weights.chunk(steps)
        if last:
            scale = weights.scale()
        for p0 in range(0, m, dot.pair):
            pair = range(p0, min(p0 + dot.pair, m))
            for j in steps:
                for s in pair:
                    dots[s] = dot.step(dots[s], w[j], load(b, xg, s * GROUP + 4 * j, I32, 4))
            if last:
                for s in pair:
                    xs = splat(b, load(b, xscale, 4 * s, F32, 4), VF)
                    d = b.sitofp(dot.finish(dots[s], corr[s]), VF)
                    acc = load(b, outs[s], 0, VF, 4) if in_memory else phis[s]
                    dots[s] = ir_fma(b, d, b.fmul(scale, xs), acc)
                    if in_memory:
                        store(b, dots[s], outs[s], 0, 4)
    after = b.add(g, const(I64, 1))
    g.add_incoming(after, loop)
    for phi, x in zip(phis, dots, strict=False):
        phi.add_incoming(x, loop)
    b.cbranch(b.icmp_signed("<", after, groups), loop, done)
    b.position_at_end(done)
    for x, out in zip(dots, outs, strict=True):
        store(b, x, out, 0, 4)


def emit_assembled(b, weights, n, s0, m, xp, groups, outs, scratch):
    """The same as `emit_groups` with the group written in assembly."""
    loop, done = b.append_basic_block(f"assembled.{m}"), b.append_basic_block(f"done.{m}")
    entry, record = b.block, scaled(b, n, XREC)
    assembly.emit_clear(b, scratch, m)
    first = plus(b, xp, scaled(b, s0, GROUP))
    to_scale = b.add(scaled(b, n, GROUP), scaled(b, s0, 4 - GROUP))  # from there, in the record
    to_corr = b.add(to_scale, scaled(b, n, 4))
    b.branch(loop)
    b.position_at_end(loop)
    g = b.phi(I64)
    g.add_incoming(const(I64, 0), entry)
    weights.at(g)
    x = plus(b, first, b.mul(g, record))
    kind = weights.kind
    assembly.emit_group(b, m, kind, weights.w, weights.s, x, plus(b, x, to_scale), plus(b, x, to_corr), scratch)
    after = b.add(g, const(I64, 1))
    g.add_incoming(after, loop)
    b.cbranch(b.icmp_signed("<", after, groups), loop, done)
    b.position_at_end(done)
    assembly.emit_results(b, scratch, outs)


def emit_switch(b, value, first, last, emit):
    """switch (value) with a case emit(m) for every m of first .. last; goes on behind it."""
    end = b.append_basic_block("end")
    switch = b.switch(value, end)
    for m in range(first, last + 1):
        case = b.append_basic_block(f"n{m}")
        switch.add_case(const(I64, m), case)
        b.position_at_end(case)
        emit(m)
        b.branch(end)
    b.position_at_end(end)


def emit_runs(b, n, most, emit):
    """n > most vectors in nearly equal runs of at most `most`: emit(m, s0) for each, m a Python int."""
    runs = b.udiv(b.add(n, const(I64, most - 1)), const(I64, most))
    least, extra = b.udiv(n, runs), b.urem(n, runs)  # the first `extra` runs hold one vector more
    with cgutils.for_range(b, runs) as run:
        more = b.icmp_signed("<", run.index, extra)
        s0 = b.add(b.mul(run.index, least), b.select(more, run.index, extra))
        emit_switch(b, b.add(least, b.zext(more, I64)), 1, most, lambda m: emit(m, s0))


def make_tile(kind):
    @intrinsic
    def tile(typingctx, n, w, ws, x, ng, out, ostride):
        """out[s*ostride + r] (f32) for s < n, r < 16, from the weight tile at w, its scales at ws and the activation
        block at x (byte addresses; ostride in elements). 1 <= n <= 16, ng >= 1."""

        def codegen(context, b, _sig, args):
            n, w, ws, x, ng, out, ostride = args
            wp, sp, xp, op = (pointer(b, a) for a in (w, ws, x, out))
            path = simd_path_of(feature_text(context))
            dot = PATHS[path][KINDS.index(kind)](b)
            assembled = kind in assembly.KINDS and path == "avx2" and features(context) >= assembly.NEEDED
            if assembled:
                scratch = cgutils.alloca_once(b, I8, size=assembly.SCRATCH_BYTES)
                assembly.emit_constants(b, scratch, kind)
            packed = Packed(b, kind, dot, has_half(context), wp, sp)

            def out_of(s):
                return plus(b, op, scaled(b, b.mul(ostride, s), 4))

            def block(m, s0=None):
                known = s0 is None  # n = m and s0 = 0: constant displacements
                n_value, s0 = (const(I64, m), const(I64, 0)) if known else (n, s0)
                outs = [out_of(b.add(s0, const(I64, s))) for s in range(m)]
                if assembled and m > 3:  # up to 3, all fits the registers
                    emit_assembled(b, packed, n_value, s0, m, xp, ng, outs, scratch)
                else:
                    emit_groups(b, dot, packed, n_value, s0, m, xp, ng, outs)

            if dot.tile < NMAX:
                emit_runs(b, n, dot.tile, block)
            else:
                emit_switch(b, n, 1, NMAX, block)
            return context.get_dummy_value()

        i = types.int64
        return types.void(i, i, i, i, i, i, i), codegen

    return tile


_tile_q4, _tile_q8, _tile_mxfp4 = (make_tile(kind) for kind in KINDS)


def run_tile(kind, n, w, ws, x, groups, out, stride):
    if kind == 1:
        _tile_q8(n, w, ws, x, groups, out, stride)
    elif kind == 3:
        _tile_mxfp4(n, w, ws, x, groups, out, stride)
    else:
        _tile_q4(n, w, ws, x, groups, out, stride)
