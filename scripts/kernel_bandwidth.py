"""What share of the memory's speed the product of a few rows reaches, by kind of weights.

    python scripts/kernel_bandwidth.py [--threads 1,2] [--rows 1,2,4,8] [--mb 256] [--rounds 21] [--simd avx2]

Streams matrices far larger than the caches through the matmul kernel, q4, q8, mxfp4 and plain reads in turn, and prints
the median GB/s (1e9 bytes of weights and scales) of each, and its share of the plain reads' median. The default takes
about a minute on two cores; anything else that runs makes all figures too low.
"""

import argparse
import statistics
import time

import numpy as np

from coli.kernels import activations, matmul, probe, runtime
from coli.kernels.runtime import address

KINDS = {"q4": matmul.KIND_Q4, "q8": matmul.KIND_Q8, "mxfp4": matmul.KIND_MXFP4}
ROWS, COLS = 2880, 2880  # of one matrix: an expert of gpt-oss
TILES, GROUPS = ROWS // 16, COLS // 32


class Matrices:
    """`count` random matrices of one kind, and jobs that multiply them with a few rows."""

    def __init__(self, kind: int, nbytes: int, rng: np.random.Generator) -> None:
        self.kind = kind
        each = TILES * GROUPS * matmul.WEIGHT_BYTES[kind]
        self.count = max(1, nbytes // each)
        self.weights = activations.aligned(self.count * each)
        block = rng.integers(0, 256, 1 << 20, dtype=np.uint8)
        for at in range(0, self.weights.size, block.size):
            self.weights[at : at + block.size] = block[: self.weights.size - at]
        scales = self.count * TILES * GROUPS * 16
        if kind == matmul.KIND_MXFP4:
            self.scales = activations.aligned(scales)
            self.scales[:] = rng.integers(118, 122, scales, dtype=np.uint8)
        else:
            self.scales = activations.aligned(scales, np.float16)
            self.scales[:] = np.float16(0.01)
        self.nbytes = self.weights.nbytes + self.scales.nbytes

    def product(self, rows: int, rng: np.random.Generator) -> "Product":
        return Product(self, rows, rng)


class Product:
    """All matrices of one kind times the same `rows` rows, in one launch."""

    def __init__(self, matrices: Matrices, rows: int, rng: np.random.Generator) -> None:
        self.nbytes = matrices.nbytes
        kind, count = matrices.kind, matrices.count
        self.x = activations.aligned(activations.x_bytes(kind, rows, GROUPS))
        values = rng.standard_normal((rows, COLS)).astype(np.float32)
        activations.pack_rows(values, np.arange(rows), kind, self.x)
        self.out = activations.aligned(count * rows * ROWS, np.float32)
        self.jobs = matmul.job_table(count)
        weights, scales = matrices.weights.nbytes // count, matrices.scales.nbytes // count
        for i, job in enumerate(self.jobs):
            job[:] = (
                kind, address(matrices.weights) + i * weights, address(matrices.scales) + i * scales, TILES, GROUPS,
                rows, 0, i * rows * ROWS, ROWS, 0,
            )  # fmt: skip

    def seconds(self, threads: int) -> float:
        began = time.perf_counter()
        matmul.run_jobs(self.jobs, self.x, self.out, threads)
        return time.perf_counter() - began


def measure(threads: int, rows: list[int], nbytes: int, rounds: int) -> None:
    rng = np.random.default_rng(1)
    kinds = {name: Matrices(kind, nbytes, rng) for name, kind in KINDS.items()}
    products = {(name, s): matrices.product(s, rng) for s in rows for name, matrices in kinds.items()}
    for product in products.values():
        product.seconds(threads)  # compiles, and touches every page
    speeds: dict[tuple[str, int], list[float]] = {key: [] for key in products}
    reads: list[float] = []
    for _ in range(rounds):
        reads.append(probe.read_bandwidth(threads, repeats=1))
        for key, product in products.items():
            speeds[key].append(product.nbytes / product.seconds(threads))
    plain = statistics.median(reads)
    print(f"{threads} threads, plain reads {plain / 1e9:.2f} GB/s")
    print("| rows | " + " | ".join(f"{name} GB/s (share)" for name in KINDS) + " | mxfp4 / q4 |")
    print("|---:|" + "---:|" * (len(KINDS) + 1))
    for s in rows:
        medians = {name: statistics.median(speeds[name, s]) for name in KINDS}
        cells = [f"{medians[name] / 1e9:.2f} ({100 * medians[name] / plain:.0f} %)" for name in KINDS]
        print(f"| {s} | " + " | ".join(cells) + f" | {medians['mxfp4'] / medians['q4']:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--mb", type=int, default=256, help="of weights of each kind")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--simd", default="auto")
    arguments = parser.parse_args()
    threads, rows = ([int(word) for word in text.split(",")] for text in (arguments.threads, arguments.rows))
    runtime.configure(arguments.simd, None, max(threads))
    for count in threads:
        measure(count, rows, arguments.mb << 20, arguments.rounds)


if __name__ == "__main__":
    main()
