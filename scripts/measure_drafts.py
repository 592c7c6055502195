"""What the grammar, corpus and n-gram sources save on a real model, as the table of docs/drafts.md.

    python scripts/measure_drafts.py MODEL [--only GROUP ...] [--rounds 1] [--threads N]

Every group is one prompt. Its variants, plain decoding first, run one after the other through `coli run --json`, and
that cycle is repeated --rounds times, so that plain and drafted runs alternate on a machine that is not quiet. Every
run is a new process without pins; one run before the first is thrown away and leaves the model's files in the page
cache. A variant whose ids or text differ from plain decoding's is marked and makes the exit code 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

GRAMMARS = Path(__file__).resolve().parent.parent / "grammars"

ORDERS = """\
{"id":1041,"customer":"Anna Keller","status":"paid","priority":"normal","total":49,"notes":"gift wrap"}
{"id":1042,"customer":"Omar Haddad","status":"shipped","priority":"high","total":120,"notes":"call first"}
{"id":1043,"customer":"Lucy Brown","status":"open","priority":"low","total":15,"notes":"none"}
{"id":1044,"customer":"Ivan Petrov","status":"cancelled","priority":"normal","total":230,"notes":"out of stock"}
{"id":1045,"customer":"Maria Silva","status":"paid","priority":"high","total":75,"notes":"leave at door"}
{"id":1046,"customer":"John Smith","status":"open","priority":"low","total":32,"notes":"none"}
"""
SLOPPY = ORDERS.replace('":', '": ').replace(',"', ', "')
PROSE = "Write a short story about a lighthouse keeper and a storm."
SEA = "Tell me about the sea."

STALE = r"""root ::= (record "\n")+
record ::= "{\"id\":" [0-9]+ ",\"client\":\"" [^"]* "\",\"state\":" ("\"new\"" | "\"done\"") ",\"amount\":" [0-9]+ "}"
"""
WRONG = r"""root ::= "{\"" ("name" | "id") "\":" [0-9]+ ",\"colour\":\"red\",\"shape\":\"round\"}" "\n"
"""
HOSTILE = r"""root ::= any+
any ::= [^a-z] | [a-z] "zqzq zqzq zqzq zqzq zqzq zqzq zqzq zqzq"
"""

RECORD_TOKENS = 760  # 20 records of SmolLM2 and a few more
COLUMNS = (
    "group",
    "variant",
    "tokens/forwards",
    "tokens/forward",
    "accepted/proposed",
    "tok/s",
    "speed",
    "CPU",
    "hits",
    "same output",
)


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt; `variants` maps a name to the flags that plain decoding does not have."""

    name: str
    flags: tuple[str, ...]
    prompt: str
    variants: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Run:
    """One `coli run`: its JSON report, the notices on standard error and the user CPU seconds of the process."""

    report: dict[str, Any]
    stderr: str
    cpu: float


def coli(model: str, flags: Sequence[str], prompt: str) -> Run:
    """Run once; raises CalledProcessError with standard error shown."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "coli", "run", "--model", model, "--pin", "off", "--json", str(path), *flags]
        command += ["--", prompt]
        before = os.times().children_user
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stderr)
            done.check_returncode()
        return Run(json.loads(path.read_text()), done.stderr, os.times().children_user - before)


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def frozen(run: Run) -> list[int]:
    ids: list[int] = run.report["token_ids"]
    return ids


def output(run: Run) -> tuple[list[int], str]:
    return frozen(run), run.report["text"]


def near_misses(ids: Sequence[int]) -> list[int]:
    """Every fourth id replaced by its neighbour: suffixes of three match, what follows them never does."""
    return [token_id ^ 1 if i % 4 == 3 else token_id for i, token_id in enumerate(ids)]


def line(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids)) + "\n"


def groups(model: str, folder: Path, only: Sequence[str], common: Sequence[str]) -> list[Group]:
    """The chosen groups; freezes the corpora they need."""

    def wanted(name: str) -> bool:
        return not only or name in only

    def freeze(flags: Sequence[str], prompt: str) -> list[int]:
        return frozen(coli(model, [*common, *flags], prompt))

    compact = ("--grammar", str(GRAMMARS / "ndjson-order.gbnf"))
    spaced = ("--grammar", str(GRAMMARS / "ndjson-order-spaced.gbnf"))
    found = []
    if wanted("orders") or wanted("sloppy"):
        other = freeze(["--raw", "--ngen", "160"], ORDERS.replace("Anna", "Peter").replace("Lucy", "Jane"))
        corpus = ("--corpus", write(folder, "orders.txt", line(other)))
        ngram = ("--draft", "8")
        beside = {"corpus": corpus, "n-gram": ngram}
        flags: tuple[str, ...] = ("--raw", "--ngen", str(RECORD_TOKENS))
        if wanted("orders"):
            together = {"compact + corpus + n-gram": (*compact, *corpus, *ngram)}
            found.append(Group("orders", flags, ORDERS, {"compact grammar": compact, **beside, **together}))
        if wanted("sloppy"):
            found.append(Group("sloppy", flags, SLOPPY, {"tolerant grammar": spaced, "compact grammar": compact}))
    if wanted("varied"):
        warm = ("--raw", "--ngen", str(RECORD_TOKENS), "--temp", "0.7", "--seed", "11")
        found.append(Group("varied", warm, ORDERS, {"compact grammar": compact, "n-gram": ("--draft", "8")}))
    if wanted("prose"):
        found.append(Group("prose", ("--ngen", "256"), PROSE, {"compact grammar": compact}))
    if wanted("identity"):
        bad = {
            name: ("--grammar", write(folder, f"{name}.gbnf", text))
            for name, text in (("stale", STALE), ("wrong", WRONG), ("hostile", HOSTILE))
        }
        for temperature in ("0", "0.9"):
            sampled = ("--raw", "--ngen", "160", "--temp", temperature, "--seed", "11")
            variants = {"right": compact, **bad, "hostile, ungated": (*bad["hostile"], "--gate", "always")}
            found.append(Group(f"identity, temperature {temperature}", sampled, ORDERS, variants))
    if wanted("replay"):
        ids = freeze(["--ngen", "96"], SEA)
        path = write(folder, "replay.txt", line(ids))
        variants = {f"K = {k}": ("--corpus", path, "--corpus-k", str(k)) for k in (8, 16, 32, 48)}
        found.append(Group("replay", ("--ngen", "96"), SEA, variants))
    if wanted("misses"):
        ids = freeze(["--ngen", "640", "--ignore-eos"], PROSE)
        unrelated = write(folder, "unrelated.txt", line(freeze(["--raw", "--ngen", "160"], ORDERS)))
        near = write(folder, "near.txt", line(near_misses(ids)))
        variants = {"unrelated corpus": ("--corpus", unrelated), "near misses": ("--corpus", near)}
        found.append(Group("misses", ("--ngen", "640", "--ignore-eos"), PROSE, variants))
    return found


def drafts(run: Run) -> str:
    """Accepted/proposed of each source, as the report counts them."""
    counts = run.report.get("drafts") or {}
    cells = [
        f"{name} {c['accepted']}/{c['proposed']} ({100 * c['accepted'] / c['proposed']:.0f} %)"
        for name, c in counts.items()
        if c["proposed"]
    ]
    return ", ".join(cells) or "-"


def measure(model: str, group: Group, common: Sequence[str], rounds: int) -> bool:
    """Print the group's rows. Returns whether every variant's ids were plain decoding's."""
    variants = {"plain": (), **group.variants}
    runs: dict[str, list[Run]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, flags in variants.items():
            runs[name].append(coli(model, [*common, *group.flags, *flags], group.prompt))
    plain = runs["plain"]
    same = True
    for name, mine in runs.items():
        report = mine[0].report
        equal = all(output(run) == output(plain[0]) for run in mine)
        same = same and equal
        speed = median(run.report["decode_tps"] for run in mine)
        ratio = median(a.report["decode_tps"] / b.report["decode_tps"] for a, b in zip(mine, plain, strict=True))
        cpu = median(a.cpu / b.cpu for a, b in zip(mine, plain, strict=True))
        cells = [
            group.name,
            name,
            f"{report['generated_tokens']}/{report['forwards']}",
            f"{report['tokens_per_forward']:.2f}",
            drafts(mine[0]),
            f"{speed:.1f}",
            f"{ratio:.2f}",
            f"{cpu:.2f}",
            f"{100 * report['expert_hit_rate']:.0f} %",
            "yes" if equal else "**NO**",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)
        for notice in mine[0].stderr.splitlines():
            if "paus" in notice or "re-arm" in notice:
                print(f"{group.name}, {name}: {notice}", file=sys.stderr, flush=True)
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a converted model")
    names = ("orders", "sloppy", "varied", "prose", "identity", "replay", "misses")
    parser.add_argument("--only", action="append", default=[], choices=names)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    common = ["--temp", "0", "--gate", "seed"]  # what a fixed depth gives; the measured gate: measure_gate.py
    if args.threads is not None:
        common += ["--threads", str(args.threads)]
    coli(args.model, [*common, "--ngen", "16", "--draft", "8"], PROSE)
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS), flush=True)
    same = True
    with tempfile.TemporaryDirectory() as folder:
        for group in groups(args.model, Path(folder), args.only, common):
            same = measure(args.model, group, common, args.rounds) and same
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
