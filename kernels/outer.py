"""The float32 micro-kernel: C[m][lanes] (+)= sum over l, ascending, of a[m][l] * B[l][lanes].

One fma per step and lane, so every element is a single chain in the order of l. It serves three loops: float32 matmul
(B = weight tile, l = k), attention scores (B = 16 positions of K, l = d) and attention values (B = V rows, l =
position).
m and the number of 16-lane blocks only decide which chains run side by side; they cannot change a bit.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from coli.kernels.simd import (
    F32,
    I16,
    I32,
    I64,
    VF,
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
    splat,
    store,
)

# (most rows m, blocks) whose accumulators fit the registers: 32 of 512 bits, 16 of 256 bits, 16 of 128 bits
WIDE = ((12, 1), (6, 2), (3, 4))
NARROW = ((6, 1), (2, 2), (1, 4))
SMALL = ((2, 1), (1, 2), (1, 4))


def shapes(context):
    found = features(context)
    if "avx512f" in found:
        return WIDE
    return NARROW if "avx2" in found else SMALL


def emit_loop(b, m, blocks, half, native, a, a_row, bp, b_step, b_block, length, c, c_row, c_block, first, ahead):
    """m rows x blocks * 16 lanes over all l; see `outer` for the arguments (i64 values, i8 pointers)."""
    loop = b.append_basic_block(f"l.{m}.{blocks}")
    done = b.append_basic_block(f"done.{m}.{blocks}")
    rows = [plus(b, a, b.mul(a_row, const(I64, i))) for i in range(m)]
    outs = [[plus(b, c, b.add(b.mul(c_row, const(I64, i)), b.mul(c_block, const(I64, j)))) for j in range(blocks)]
            for i in range(m)]  # fmt: skip
    fresh = b.append_basic_block(f"fresh.{m}.{blocks}")
    resume = b.append_basic_block(f"resume.{m}.{blocks}")
    b.cbranch(b.icmp_signed("==", first, const(I64, 0)), resume, fresh)
    b.position_at_end(fresh)
    b.branch(loop)
    b.position_at_end(resume)
    before = [[load(b, outs[i][j], 0, VF, 4) for j in range(blocks)] for i in range(m)]
    b.branch(loop)
    b.position_at_end(loop)
    index = b.phi(I64)
    index.add_incoming(const(I64, 0), fresh)
    index.add_incoming(const(I64, 0), resume)
    acc = [[b.phi(VF) for _ in range(blocks)] for _ in range(m)]
    for i in range(m):
        for j in range(blocks):
            acc[i][j].add_incoming(const(VF, 0.0), fresh)
            acc[i][j].add_incoming(before[i][j], resume)
    base = plus(b, bp, b.mul(index, b_step))
    lanes = []
    for j in range(blocks):
        at = plus(b, base, b.mul(b_block, const(I64, j))) if j else base
        call(b, "llvm.prefetch.p0", ir.VoidType(), plus(b, at, ahead), const(I32, 0), const(I32, 3), const(I32, 1))
        lanes.append(half_to_float(b, load(b, at, 0, V(I16, 16), 2), native) if half else load(b, at, 0, VF, 4))
    offset = b.mul(index, const(I64, 4))
    total = [[None] * blocks for _ in range(m)]
    for i in range(m):
        x = splat(b, load(b, rows[i], offset, F32, 4), VF)
        for j in range(blocks):
            total[i][j] = ir_fma(b, x, lanes[j], acc[i][j])
    after = b.add(index, const(I64, 1))
    index.add_incoming(after, loop)
    for i in range(m):
        for j in range(blocks):
            acc[i][j].add_incoming(total[i][j], loop)
    b.cbranch(b.icmp_signed("<", after, length), loop, done)
    b.position_at_end(done)
    for i in range(m):
        for j in range(blocks):
            store(b, total[i][j], outs[i][j], 0, 4)


@intrinsic
def _outer(typingctx, half, m, blocks, a, a_row, bp, b_step, b_block, length, c, c_row, c_block, first, ahead):
    """C[i][j] (16 f32 at c + i*c_row + j*c_block) from a (f32 rows at a + i*a_row) and B (16 lanes at
    bp + l*b_step + j*b_block, fp16 if half). i < m, j < blocks, l < length >= 1; all strides in bytes.
    first != 0 starts from zero, else the chains go on from what C holds. B is prefetched `ahead` bytes in front."""

    def codegen(context, b, _sig, args):
        half, m, blocks, a, a_row, bp, b_step, b_block, length, c, c_row, c_block, first, ahead = args
        a, bp, c = (pointer(b, x) for x in (a, bp, c))
        native, most = has_half(context), shapes(context)
        # rows go in nearly equal runs; B goes in runs of blocks, as wide as the rows leave registers, outermost, so
        # that a run is in the first-level cache for all rows but the first
        limit = const(I64, most[0][0])
        runs = b.udiv(b.add(m, const(I64, most[0][0] - 1)), limit)
        least, extra = b.udiv(m, runs), b.urem(m, runs)  # the first `extra` runs hold one row more
        largest = b.udiv(b.add(m, b.sub(runs, const(I64, 1))), runs)
        widest = const(I64, 1)
        for rows_limit, count in most[1:]:
            widest = b.select(b.icmp_signed("<=", largest, const(I64, rows_limit)), const(I64, count), widest)
        entry, head, done = b.block, b.append_basic_block("blocks"), b.append_basic_block("end")
        b.branch(head)
        b.position_at_end(head)
        j0 = b.phi(I64)
        j0.add_incoming(const(I64, 0), entry)
        left, width = b.sub(blocks, j0), const(I64, 1)
        for count in (2, 4):
            fits = b.and_(b.icmp_signed("<=", const(I64, count), left), b.icmp_signed("<=", const(I64, count), widest))
            width = b.select(fits, const(I64, count), width)
        bj, cj = plus(b, bp, b.mul(j0, b_block)), plus(b, c, b.mul(j0, c_block))
        with cgutils.for_range(b, runs) as run:
            more = b.icmp_signed("<", run.index, extra)
            rows = b.add(least, b.zext(more, I64))
            i0 = b.add(b.mul(run.index, least), b.select(more, run.index, extra))
            ai, cij = plus(b, a, b.mul(i0, a_row)), plus(b, cj, b.mul(i0, c_row))
            end = b.append_basic_block("case.end")
            key = b.add(b.mul(width, const(I64, 32)), rows)
            key = b.add(key, b.mul(b.and_(half, const(I64, 1)), const(I64, 1024)))
            switch = b.switch(key, end)
            for is_half in (False, True):
                for rows_limit, count in most:
                    for i in range(1, rows_limit + 1):
                        case = b.append_basic_block(f"case.{i}.{count}")
                        switch.add_case(const(I64, count * 32 + i + 1024 * is_half), case)
                        b.position_at_end(case)
                        emit_loop(
                            b, i, count, is_half, native, ai, a_row, bj, b_step, b_block, length,
                            cij, c_row, c_block, first, ahead,
                        )  # fmt: skip
                        b.branch(end)
            b.position_at_end(end)
        j1 = b.add(j0, width)
        j0.add_incoming(j1, b.block)
        b.cbranch(b.icmp_signed("<", j1, blocks), head, done)
        b.position_at_end(done)
        return context.get_dummy_value()

    i = types.int64
    return types.void(*[i] * 14), codegen


def run_outer(half, m, blocks, a, a_row, bp, b_step, b_block, length, c, c_row, c_block, first, ahead):
    _outer(half, m, blocks, a, a_row, bp, b_step, b_block, length, c, c_row, c_block, first, ahead)
