"""From a command to the first byte of its answer: wall time, CPU time and where they go.

python scripts/first_token.py [--runs 20] [--tree FOLDER ...] -- run --model MODEL --ngen 1 "Hello"

Runs the command in a new process again and again, with the trees (checkouts of this repository; this one if none is
named) taking turns, and prints for each the median and least time from the start of the process to the first byte on
its standard output, the least processor time of the whole process, and a table of stages from runs of their own. A
first run of each fills the kernel cache, and a folder with the modules' bytecode, as installing them does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# The parts of a process end where the first of these returns (or, for "command line", is called).
STAGES = """
import importlib.util, json, sys, time
begun = float(sys.argv[1])
place, sys.argv[1:] = sys.argv[2], sys.argv[3:]
seen = {"interpreter": time.monotonic() - begun}
def mark(stage):
    seen.setdefault(stage, time.monotonic() - begun)
def after(module, name, stage, before=False):
    module = importlib.import_module(module)
    *holder, name = name.split(".")
    holder = getattr(module, holder[0]) if holder else module
    found = vars(holder)[name]
    function = getattr(found, "__func__", found)
    def marked(*args, **kwargs):
        if before:
            mark(stage)
        result = function(*args, **kwargs)
        if not before:
            mark(stage)
        return result
    setattr(holder, name, classmethod(marked) if isinstance(found, classmethod) else marked)
from coli.cli import entry
after("coli.cli.run", "respond", "command line", before=True)
after("coli.text.loading", "load_meanwhile", "tokenizer begun")
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name != "coli.llm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def executed(module):
            execute(module)
            mark("imports")
            after("coli.llm", "LLM.open", "container, tokenizer")
            after("coli.cli.run", "_prompt_ids", "prompt to ids")
            after("coli.loading", "prepare_kernels", "code cache")
            after("coli.loading", "load_weights", "weights")
            after("coli.llm", "LLM.load", "model")
            after("coli.cli.streams", "Streams.text", "first token", before=True)
        spec.loader.exec_module = executed
        return spec
sys.meta_path.insert(0, Watch())
try:
    entry.main()
finally:
    with open(place, "w") as file:
        json.dump(seen, file)
"""


def environment(bytecode: str) -> dict[str, str]:
    """This process's, with bytecode kept in a folder of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return kept | {"PYTHONPYCACHEPREFIX": bytecode}


def timed(tree: Path, command: list[str], variables: dict[str, str]) -> tuple[float, float]:
    """Seconds to the first byte of the answer, and of processor time."""
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "coli", *command],
        cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=variables,
    )  # fmt: skip
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    elapsed = time.monotonic() - begun
    process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not first:
        sys.exit(
            f"{tree}: coli {' '.join(command)} ended with {process.returncode} and {'an' if first else 'no'} answer"
        )
    return elapsed, usage.ru_utime + usage.ru_stime


def staged(tree: Path, command: list[str], place: Path, variables: dict[str, str]) -> dict[str, float]:
    """When each stage was over, in seconds from the start of the process."""
    done = subprocess.run(
        [sys.executable, "-c", STAGES, str(time.monotonic()), str(place), *command],
        cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=variables,
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stderr)
    found = json.loads(place.read_text())
    place.unlink()
    return {str(stage): float(end) for stage, end in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--tree", type=Path, action="append", help="checkout to run; several take turns")
    parser.add_argument("--stages", type=int, default=5, help="runs for the table of stages")
    parser.add_argument("command", nargs="+", help="of coli, after --")
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.tree or [Path(__file__).parents[1]]]
    with tempfile.TemporaryDirectory() as folder:
        measure(trees, options, Path(folder))


def measure(trees: list[Path], options: argparse.Namespace, folder: Path) -> None:
    variables, command = environment(str(folder / "bytecode")), options.command
    for tree in trees:
        timed(tree, command, variables)
    runs: dict[Path, list[tuple[float, float]]] = {tree: [] for tree in trees}
    for _ in range(options.runs):
        for tree in trees:
            runs[tree].append(timed(tree, command, variables))
    for tree in trees:
        walls, seconds = zip(*runs[tree], strict=True)
        print(
            f"{tree}: first byte after {statistics.median(walls):.3f} s (median of {options.runs}; "
            f"{min(walls):.3f} .. {max(walls):.3f}), processor {min(seconds):.3f} s at least"
        )
    for tree in trees if options.stages else []:
        tables = [staged(tree, command, folder / "stages", variables) for _ in range(options.stages)]
        print(f"\n{tree}: stage, its seconds, seconds since the start (medians of {options.stages})")
        before = 0.0
        for stage in tables[0]:
            end = statistics.median(table[stage] for table in tables)
            print(f"  {stage:22}{end - before:7.3f}{end:9.3f}")
            before = end


if __name__ == "__main__":
    main()
