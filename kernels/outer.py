"""The float32 micro-kernel: C[m][lanes] (+)= sum over l, ascending, of a[m][l] * B[l][lanes].

One fma per step and lane, so every element is a single chain in the order of l. It serves three loops: float32 matmul
(B = weight tile, l = k), attention scores (B = 16 positions of K, l = d) and attention values (B = V rows, l =
position).
m and the number of 16-lane blocks only decide which chains run side by side; they cannot change a bit.
"""

from numba import types
from numba.extending import intrinsic

from coli.kernels.runtime import Routine, caller
from coli.kernels.simd import (
    F32,
    I16,
    I64,
    VF,
    V,
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


def emit_loop(b, m, blocks, half, native, a, a_row, bp, b_step, b_block, length, c, c_row, c_block, first):
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
def _outer(typingctx, half, m, blocks, a, a_row, bp, b_step, b_block, length, c, c_row, c_block, first):
    """C[i][j] (16 f32 at c + i*c_row + j*c_block) from a (f32 rows at a + i*a_row) and B (16 lanes at
    bp + l*b_step + j*b_block, fp16 if half). i < m, j < blocks, l < length >= 1; all strides in bytes.
    first != 0 starts from zero, else the chains go on from what C holds."""

    def codegen(context, b, _sig, args):
        half, m, blocks, a, a_row, bp, b_step, b_block, length, c, c_row, c_block, first = args
        a, bp, c = (pointer(b, x) for x in (a, bp, c))
        end = b.append_basic_block("end")
        native = has_half(context)
        most = shapes(context)
        # rows go in nearly equal runs of at most `limit`; 16-lane blocks in runs of at most 4, 2 or 1 as m allows
        start, row_head = b.block, b.append_basic_block("rows")
        b.branch(row_head)
        b.position_at_end(row_head)
        i0 = b.phi(I64)
        i0.add_incoming(const(I64, 0), start)
        row_next = b.append_basic_block("rows.next")
        left = b.sub(m, i0)
        limit = const(I64, most[0][0])
        runs = b.udiv(b.add(left, const(I64, most[0][0] - 1)), limit)
        rows = b.udiv(b.add(left, b.sub(runs, const(I64, 1))), runs)  # nearly equal runs
        run = const(I64, 1)
        for rows_limit, count in most[1:]:
            run = b.select(b.icmp_signed("<=", rows, const(I64, rows_limit)), const(I64, count), run)
        block_head = b.append_basic_block("blocks")
        before_blocks = b.block
        b.branch(block_head)
        b.position_at_end(block_head)
        j0 = b.phi(I64)
        j0.add_incoming(const(I64, 0), before_blocks)
        todo = b.sub(blocks, j0)
        # the widest count that is left: 4, 2, 1
        width = const(I64, 1)
        for count in (2, 4):
            fits = b.and_(b.icmp_signed("<=", const(I64, count), todo), b.icmp_signed("<=", const(I64, count), run))
            width = b.select(fits, const(I64, count), width)
        block_next = b.append_basic_block("blocks.next")
        ai = b.gep(a, [b.mul(i0, a_row)])
        bj = b.gep(bp, [b.mul(j0, b_block)])
        cij = b.gep(c, [b.add(b.mul(i0, c_row), b.mul(j0, c_block))])
        key = b.add(b.mul(width, const(I64, 32)), rows)
        key = b.add(key, b.mul(b.and_(half, const(I64, 1)), const(I64, 1024)))
        switch = b.switch(key, block_next)
        for is_half in (False, True):
            for rows_limit, count in most:
                for i in range(1, rows_limit + 1):
                    case = b.append_basic_block(f"case.{i}.{count}")
                    label = count * 32 + i + 1024 * is_half
                    switch.add_case(const(I64, label), case)
                    b.position_at_end(case)
                    emit_loop(
                        b, i, count, is_half, native, ai, a_row, bj, b_step, b_block, length,
                        cij, c_row, c_block, first,
                    )  # fmt: skip
                    b.branch(block_next)
        b.position_at_end(block_next)
        j1 = b.add(j0, width)
        j0.add_incoming(j1, block_next)
        b.cbranch(b.icmp_signed("<", j1, blocks), block_head, row_next)
        b.position_at_end(row_next)
        i1 = b.add(i0, rows)
        i0.add_incoming(i1, row_next)
        b.cbranch(b.icmp_signed("<", i1, m), row_head, end)
        b.position_at_end(end)
        return context.get_dummy_value()

    i = types.int64
    return types.void(*[i] * 13), codegen


def _run_outer(half, m, blocks, a, a_row, bp, b_step, b_block, length, c, c_row, c_block, first):
    _outer(half, m, blocks, a, a_row, bp, b_step, b_block, length, c, c_row, c_block, first)


OUTER = Routine(_run_outer, 13)
call_outer = caller(13)
