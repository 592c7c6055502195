"""Prompts and sources by which the gates are compared (measure_gate.py, simulate_gate.py)."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coli.options import DraftOptions

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measure_drafts import GRAMMARS, ORDERS, PROSE, SEA, WRONG, line, near_misses

CODE = """Rename the function `area` to `surface` in this module and change nothing else.

```python
import math


def area(shape, width, height):
    if shape == "circle":
        return math.pi * (width / 2) ** 2
    if shape == "triangle":
        return width * height / 2
    return width * height


def total(shapes):
    result = 0
    for shape, width, height in shapes:
        result += area(shape, width, height)
    return result


def largest(shapes):
    return max(area(shape, width, height) for shape, width, height in shapes)
```

The module with the new name:

```python
import math


def surface(shape"""
DEMO_ORDERS = (
    "order 17 from Anna Keller, paid, total 49, gift wrap. order 18 for Omar Haddad, shipped, high priority, total "
    "120, call first. order 19 for Lucy Brown, open, total 15. order 20 from Ivan Petrov, cancelled, total 230."
)
DEMO_EVENT = "team meeting with Nora Quist in Oslo on 3 May 2026 at 14:30, bring the budget. "
DEMO_LOG = "error at 12:04:55 in the billing service on host web-17: connection refused after 3 retries"


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt and the sources drafts come from, as options."""

    name: str
    prompt: str
    raw: bool
    drafts: DraftOptions
    tokens: int


def groups(
    answer: Callable[[Group], tuple[int, ...]], demo: bool, folder: Path, tokens: int, only: Sequence[str]
) -> list[Group]:
    """The chosen groups of a model, with the corpora they need frozen from its own answers.

    answer: the ids of a group without drafts.
    """
    prose, orders = (DEMO_EVENT, DEMO_ORDERS) if demo else (PROSE, ORDERS)
    kind = "demo" if demo else "smol"
    grammar = GRAMMARS / "ndjson-order.gbnf"

    answers: dict[tuple[str, int], tuple[int, ...]] = {}

    def frozen(name: str, prompt: str, raw: bool, count: int, wrong: bool = False) -> Path:
        group = Group(name, prompt, raw, DraftOptions(), count)
        if (prompt, count) not in answers:
            answers[prompt, count] = answer(group)
        ids = answers[prompt, count]
        path = folder / f"{kind}-{name}.txt"
        path.write_text(line(near_misses(ids) if wrong else ids))
        return path

    def wanted(name: str) -> bool:
        return not only or name in only

    found: list[Group] = []
    ngram = DraftOptions(draft=8)
    if wanted("prose"):
        found.append(Group("novel prose", prose, False, ngram, tokens))
    if wanted("near-miss"):
        corpus = frozen("near", prose, False, tokens, wrong=True)
        found.append(Group("near-miss corpus", prose, False, DraftOptions(corpus=corpus, draft=0), tokens))
    if wanted("wrong"):
        (folder / "wrong.gbnf").write_text(WRONG)
        wrong = DraftOptions(grammar=folder / "wrong.gbnf", draft=0)
        found.append(Group("wrong grammar", orders, not demo, wrong, tokens))

    def merged(name: str, prompt: str, raw: bool, count: int, *, more: str = "", **sources: DraftOptions) -> None:
        """All sources at once, and each alone."""
        alone = "alone" in only or not only
        together = DraftOptions(draft=8)
        for drafts in sources.values():
            together = replace(together, corpus=drafts.corpus or together.corpus)
            together = replace(together, grammar=drafts.grammar or together.grammar)
        found.append(Group(name + more, prompt, raw, together, count))
        for source, drafts in {**sources, "n-gram": ngram}.items() if alone else ():
            found.append(Group(f"{name}, {source} alone", prompt, raw, drafts, count))

    if wanted("perfect"):
        corpus = DraftOptions(corpus=frozen("perfect", prose, False, tokens), draft=0)
        found.append(Group("replay, corpus alone", prose, False, corpus, tokens))
        if "alone" in only or not only:
            found.append(Group("replay, corpus and n-gram", prose, False, replace(corpus, draft=8), tokens))
    if wanted("ndjson"):
        other = orders.replace("Anna", "Peter").replace("Lucy", "Jane")
        corpus = DraftOptions(corpus=frozen("related", other, not demo, 160), draft=0)
        forced = DraftOptions(grammar=grammar, draft=0)
        merged("NDJSON", orders, not demo, tokens, more=", all sources", grammar=forced, corpus=corpus)
    if wanted("code"):
        name, text = ("log line", DEMO_LOG) if demo else ("code edit", CODE)
        corpus = DraftOptions(corpus=frozen("code", text.replace("surface", "extent"), True, tokens // 2), draft=0)
        merged(name, text, True, tokens, more=", corpus of another and n-gram", corpus=corpus)
    if wanted("questions"):
        first, second = (DEMO_LOG, DEMO_LOG.replace("17", "23")) if demo else (SEA, SEA.replace("Tell", "Please tell"))
        corpus = DraftOptions(corpus=frozen("question", first, False, tokens // 2), draft=0)
        merged("repeated question", second, False, tokens // 2, more=", corpus and n-gram", corpus=corpus)
    return found
