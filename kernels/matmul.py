"""out[s, r] = sum_k W[r, k] x[s, k] (+ bias[r]) for any number of matrices in one parallel launch.

Weights are addressed, in tiles of 16 rows (rows padded to 16, columns to 32 with zero weights):
    q4   per tile and group of 32 k: 256 bytes = 4 chunks of 64; chunk j, byte 4r+b holds k = 8j+b (low nibble) and
         8j+4+b (high nibble) of row r; value (nibble - 8) * scale
    q8   512 bytes = 8 chunks; chunk j, byte 4r+b = q[row r, k = 4j+b] + 128; value q * scale
    mxfp4  as q4, the nibbles being E2M1 codes; value of the code * 2**(scale - 127)
    f32  [tile][k][16] float32
    scales (q4, q8): fp16 [tile][group][16], a separate array; mxfp4: uint8, likewise
Per output element: one chain of fma over the groups (all but f32) or over k (f32), ascending; the bias is added last.
Threads take whole tiles, never a part of a sum: bits do not depend on S, threads, or what else is in the launch.
"""

import numpy as np

from coli.kernels.activations import x_bytes
from coli.kernels.loops import MOST_BLOCKS, OUTER, PANEL, TILE, call_outer, call_panel, call_tile, has_panel
from coli.kernels.ops import fadd, load_f32x16, load_i64, stack, store_f32x16
from coli.kernels.runtime import Stage, address, arguments, device, unpacker

unpack7, tile_sums = unpacker(7), stack(1024 * MOST_BLOCKS)

KIND_F32, KIND_Q8, KIND_Q4, KIND_MXFP4 = 0, 1, 2, 3
WEIGHT_BYTES = (16 * 32 * 4, 512, 256, 256)  # per tile and group, by kind
JOB_COLUMNS = 10
(JOB_KIND, JOB_WEIGHTS, JOB_SCALES, JOB_TILES, JOB_GROUPS, JOB_ROWS, JOB_X, JOB_OUT, JOB_STRIDE, JOB_BIAS) = range(10)
AHEAD = 4096  # bytes by which float32 weights are prefetched
# Twice the value of an MXFP4 code (E2M1: a sign, two bits of exponent, one of mantissa).
TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
L2_BYTES = 256 * 1024  # of activations per pass over the weights
__all__ = ["JOB_COLUMNS", "KIND_F32", "KIND_MXFP4", "KIND_Q4", "KIND_Q8", "job_table", "run_jobs", "x_bytes"]


def _run_jobs(args, part, parts):
    """args: jobs (J, 10), J, x, out, addresses of TILE, OUTER and PANEL."""
    jobs, count, x, out, tile, outer, panel = unpack7(args, 0)
    total = 0
    for j in range(count):
        job = jobs + 80 * j
        total += load_i64(job + 24) * _tile_cost(load_i64(job), load_i64(job + 32), load_i64(job + 40))
    first, stop = total * part // parts, total * (part + 1) // parts
    done = 0
    for j in range(count):
        job = jobs + 80 * j
        kind, tiles, groups, rows = load_i64(job), load_i64(job + 24), load_i64(job + 32), load_i64(job + 40)
        cost = _tile_cost(kind, groups, rows)
        # a tile belongs to the part that holds the first unit of its cost
        t0 = min(max((first - done + cost - 1) // cost, 0), tiles)
        t1 = min(max((stop - done + cost - 1) // cost, 0), tiles)
        done += tiles * cost
        if t0 < t1 and rows > 0:
            _run_tiles(
                tile,
                outer,
                panel,
                job,
                kind,
                t0,
                t1,
                groups,
                rows,
                x + load_i64(job + 48),
                out + 4 * load_i64(job + 56),
            )


@device
def _tile_cost(kind, groups, rows):
    """Relative time of one tile: streaming its weights or multiplying its rows, whichever takes longer."""
    if rows == 0:
        return 1
    if kind == 0:
        return groups * max(90, 9 * rows)
    return groups * (max(24, 4 * rows) if kind == 1 else max(12, 3 * rows))


@device
def _run_tiles(tile, outer, panel, job, kind, t0, t1, groups, rows, x, out):
    """Tiles t0 .. t1-1 of one job; blocks of activations are taken in spans that stay in the second-level cache."""
    weights, scales = load_i64(job + 8), load_i64(job + 16)
    stride, bias = load_i64(job + 64), load_i64(job + 72)
    if kind == 0:
        k = groups * 32
        for t in range(t0, t1, 4):
            some = min(4, t1 - t)
            call_outer(
                outer,
                0,
                rows,
                some,
                x,
                k * 4,
                weights + t * k * 64,
                64,
                k * 64,
                k,
                out + 64 * t,
                stride * 4,
                64,
                1,
                AHEAD,
            )
    else:
        sums = tile_sums()
        blocks = max(1, (rows + 15) // 16)
        base, extra = rows // blocks, rows % blocks
        span = min(MOST_BLOCKS, max(1, 262144 // (16 * groups * 40)))
        step, scale_step = 512 if kind == 1 else 256, 16 if kind == 3 else 32
        for i0 in range(0, blocks, span):
            for t in range(t0, t1):
                w, ws, o = weights + t * groups * step, scales + t * groups * scale_step, out + 64 * t
                i1 = min(blocks, i0 + span)
                if kind == 2 and rows > 16 and has_panel():
                    first = i0 * base + min(i0, extra)
                    o += 4 * first * stride
                    call_panel(panel, i0, i1, base, extra, w, ws, x, groups, sums, o, 4 * stride)
                    _write(sums, i1 * base + min(i1, extra) - first, bias, t, o, stride)
                    continue
                for i in range(i0, i1):
                    s0 = i * base + min(i, extra)
                    n = base + 1 if i < extra else base
                    call_tile(tile, kind, n, w, ws, x + s0 * groups * 40, groups, sums, 16)
                    _write(sums, n, bias, t, o + 4 * s0 * stride, stride)
    if kind == 0 and bias != 0:
        for s in range(rows):
            for t in range(t0, t1):
                o = out + 4 * s * stride + 64 * t
                store_f32x16(o, fadd(load_f32x16(o), load_f32x16(bias + 64 * t)))


@device
def _write(sums, n, bias, t, out, stride):
    """n sums of tile t to their rows of out."""
    for s in range(n):
        v = load_f32x16(sums + 64 * s)
        if bias != 0:
            v = fadd(v, load_f32x16(bias + 64 * t))
        store_f32x16(out + 4 * s * stride, v)


RUN_JOBS = Stage(_run_jobs)


def run_jobs(jobs: np.ndarray, x: np.ndarray, out: np.ndarray, threads: int) -> None:
    """Run every job; jobs int64 (J, 10), x uint8 buffer of packed activations, out float32 buffer.

    Columns: 0 kind, 1 weights address, 2 scales address, 3 tiles, 4 groups (columns / 32), 5 rows S, 6 byte offset of
    this job's block in x, 7 element offset in out, 8 elements between rows of out (>= 16 * tiles), 9 address of the
    float32 bias (16 * tiles values) or 0. Jobs must not overlap in out."""
    assert jobs.dtype == np.int64
    assert jobs.shape[1:] == (JOB_COLUMNS,)
    assert jobs.flags.c_contiguous
    assert out.dtype == np.float32
    assert out.flags.c_contiguous
    assert x.flags.c_contiguous
    RUN_JOBS.run(
        arguments(address(jobs), len(jobs), address(x), address(out), TILE.address, OUTER.address, PANEL.address),
        threads,
    )


def job_table(count: int) -> np.ndarray:
    """An empty table of jobs, int64 (count, 10)."""
    return np.zeros((count, JOB_COLUMNS), np.int64)
