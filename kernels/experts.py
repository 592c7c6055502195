"""From routed experts to tables of work: which rows each expert gets, where they are packed, which jobs multiply them.

One serial stage per sparse layer, in front of pack / gate+up / swiglu / pack / down. It takes the whole union when
every expert of it is resident, else it stops the tape; then the caller runs it on one arriving batch at a time.
Outputs are placed in order of processing, and `index` says where, so that the sum can go by ascending expert id.
"""

import numpy as np

from coli.kernels.ops import load_i64, store_i64
from coli.kernels.runtime import Stage, address, arguments

PART_COLUMNS = 7  # of a matrix of the record: kind, groups, tiles, offsets of weights, scales, output column, bias or 0
ALL_RESIDENT = -1  # as the batch count: the whole union, if it is resident


def _plan_experts(args, part, parts):
    """args: 0 expert_ids (S, A), 1 S, 2 A, 3 E, 4 residency (E), 5 batch (E), 6 batch count (1), 7 status (1),
    8 stop code, 9 done (1), 10 index (S, A), 11 row_ids (S*A), 12 scratch (2, E), 13 parts (n+1, 7), the last
    is down, 14 n, 15 blocks in, 16 jobs in, 17 blocks down, 18 jobs down, 19..23 argument blocks of pack,
    multiply, swiglu, pack, multiply, 24 stride of gate_up, 25 stride of the outputs."""
    ids, rows, active, experts = load_i64(args), load_i64(args + 8), load_i64(args + 16), load_i64(args + 24)
    residency, batch, chosen = load_i64(args + 32), load_i64(args + 40), load_i64(load_i64(args + 48))
    done_at, index, row_ids, counts = load_i64(args + 72), load_i64(args + 80), load_i64(args + 88), load_i64(args + 96)
    starts = counts + 8 * experts
    pairs = rows * active
    for e in range(experts):
        store_i64(counts + 8 * e, 0)
        store_i64(starts + 8 * e, -1)
    for p in range(pairs):
        at = counts + 8 * load_i64(ids + 8 * p)
        store_i64(at, load_i64(at) + 1)
    if chosen < 0:
        chosen = 0
        for e in range(experts):
            if load_i64(counts + 8 * e) > 0:
                if load_i64(residency + 8 * e) == 0:
                    store_i64(load_i64(args + 56), load_i64(args + 64))
                    return
                store_i64(batch + 8 * chosen, e)
                chosen += 1
        store_i64(done_at, 0)
    done = load_i64(done_at)
    placed = 0
    for i in range(chosen):
        e = load_i64(batch + 8 * i)
        store_i64(starts + 8 * e, placed)
        placed += load_i64(counts + 8 * e)
    for p in range(pairs):
        at = starts + 8 * load_i64(ids + 8 * p)
        place = load_i64(at)
        if place >= 0:
            store_i64(at, place + 1)  # a cursor; the start comes back as cursor - count
            store_i64(row_ids + 8 * place, p // active)
            store_i64(index + 8 * p, done + place)

    table, inputs = load_i64(args + 104), load_i64(args + 112)
    pack_in, jobs_in, pack_down, jobs_down = (
        load_i64(args + 120),
        load_i64(args + 128),
        load_i64(args + 136),
        load_i64(args + 144),
    )
    offset = 0
    shared = rows == 1  # one row: all experts read the same packed block
    blocks, jobs = 0, 0
    for m in range(inputs + 1):
        is_down = m == inputs
        if is_down:
            offset = 0
        one = table + 56 * m
        kind, groups, tiles = load_i64(one), load_i64(one + 8), load_i64(one + 16)
        block_table = pack_down if is_down else pack_in
        job_table = jobs_down if is_down else jobs_in
        stride = load_i64(args + 200) if is_down else load_i64(args + 192)
        base = done if is_down else 0
        if is_down:
            store_i64(load_i64(args + 152) + 40, blocks)
            store_i64(load_i64(args + 160) + 8, jobs)
            blocks, jobs = 0, 0
        for i in range(chosen):
            e = load_i64(batch + 8 * i)
            count = load_i64(counts + 8 * e)
            start = load_i64(starts + 8 * e) - count
            if is_down or not shared or i == 0:
                block = block_table + 32 * blocks
                store_i64(block, start)
                store_i64(block + 8, count)
                store_i64(block + 16, kind)
                store_i64(block + 24, offset)
                blocks += 1
                x = offset
                offset += (count * groups * (128 if kind == 0 else 40) + 63) // 64 * 64
            job = job_table + 80 * jobs
            record = load_i64(residency + 8 * e)
            store_i64(job, kind)
            store_i64(job + 8, record + load_i64(one + 24))
            store_i64(job + 16, record + load_i64(one + 32))
            store_i64(job + 24, tiles)
            store_i64(job + 32, groups)
            store_i64(job + 40, count)
            store_i64(job + 48, x)
            store_i64(job + 56, (base + start) * stride + load_i64(one + 40))
            store_i64(job + 64, stride)
            bias = load_i64(one + 48)
            store_i64(job + 72, record + bias if bias != 0 else 0)
            jobs += 1
    store_i64(load_i64(args + 168) + 8, placed)
    store_i64(load_i64(args + 176) + 40, blocks)
    store_i64(load_i64(args + 184) + 8, jobs)
    store_i64(done_at, done + placed)


PLAN_EXPERTS = Stage(_plan_experts)


def plan_experts(
    expert_ids: np.ndarray,
    residency: np.ndarray,
    batch: np.ndarray,
    batch_count: np.ndarray,
    status: np.ndarray,
    stop_code: int,
    done: np.ndarray,
    index: np.ndarray,
    row_ids: np.ndarray,
    parts: np.ndarray,
    tables: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    patched: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    strides: tuple[int, int],
) -> None:
    """Fill the tables of one sparse layer; all arrays int64 and contiguous.

    expert_ids   (S, A) ascending in each row
    residency    (E,) record addresses, 0 = absent
    batch        (E,) expert ids to take, batch_count (1,) how many; ALL_RESIDENT: take the union and write it to
                 `batch`, or, if one of it is absent, write `stop_code` to status (1,) and nothing else
    done         (1,) outputs placed so far (reset to 0 by ALL_RESIDENT)
    index        (S, A) place of each pair's output, row_ids (S*A,) row of each place of this batch
    parts        (n + 1, 7): the input matrices, then down
    tables       blocks and jobs of the inputs, blocks and jobs of down
    patched      argument blocks of pack, multiply, swiglu, pack, multiply, whose counts are written
    strides      floats between rows of gate_up and of the outputs"""
    rows, active = expert_ids.shape
    scratch = np.zeros((2, len(residency)), np.int64)
    block = arguments(
        address(expert_ids), rows, active, len(residency), address(residency), address(batch), address(batch_count),
        address(status), stop_code, address(done), address(index), address(row_ids), address(scratch), address(parts),
        len(parts) - 1, *(address(table) for table in tables), *(address(args) for args in patched), *strides,
    )  # fmt: skip
    PLAN_EXPERTS.run(block)
