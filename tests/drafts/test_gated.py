"""Sources as one tree: merged, chained, counted and learnt from; `--gate auto` through the composition root."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from containers import container
from drafts.adversarial import ScriptedSource
from drafts.simulated_machine import linear, simulate

from coli.drafts.acceptance import Acceptance
from coli.drafts.base import Draft
from coli.drafts.gate import Gate
from coli.drafts.gated import ASKED_EVERY, TreeSources
from coli.drafts.merge import MergedSources
from coli.drafts.opening import SourceLibrary
from coli.errors import OptionError
from coli.llm import LLM
from coli.options import DraftOptions, EngineOptions, GenerateOptions, SamplerOptions

PROMPT = [5, 17, 40, 3, 9, 17, 40]


def says(name: str, *token_ids: int) -> ScriptedSource:
    """Always these ids behind a context of one id, nothing further on."""
    draft = Draft.chain(token_ids, name) if token_ids else None
    return ScriptedSource(name, lambda context, limit: draft if context == [0] else None)


def test_without_a_gate_everything_is_drafted_once():
    sources = [says("graph", 5, 6), says("ngram", 1, 9), says("corpus", 1, 2), says("grammar")]
    drafter = TreeSources(sources, vocab_size=10)
    drafter.begin([0])
    draft = drafter.propose(63)
    assert draft is not None
    above = {token_id: draft.token_ids[parent] if parent >= 0 else None for token_id, parent in pairs(draft)}
    assert above == {1: None, 2: 1, 9: 1, 5: None, 6: 5}
    assert len(draft) == 5
    drafter.judged(draft, [draft.token_ids.index(1)], 2)
    assert {name: (c.proposed, c.judged, c.accepted) for name, c in drafter.counters.items()} == {
        "grammar": (0, 0, 0),
        "corpus": (2, 2, 1),
        "ngram": (2, 2, 1),
        "graph": (2, 1, 0),
    }


def pairs(draft: Draft) -> list[tuple[int, int]]:
    return list(zip(draft.token_ids, draft.parents, strict=True))


def test_others_go_on_from_the_end_of_a_likely_chain():
    acceptance = Acceptance()
    for _ in range(20):
        acceptance.add("grammar", 0, 0, True)

    def counting(context: list[int], limit: int) -> Draft | None:
        return Draft.chain(range(len(context), 9), "corpus") if len(context) < 9 else None

    going_on = ScriptedSource("corpus", counting)
    grammar = ScriptedSource("grammar", lambda context, limit: Draft.chain([1, 2], "grammar"))
    drafter = TreeSources([going_on, grammar], vocab_size=10, acceptance=acceptance)
    drafter.begin([0] * 5)
    draft = drafter.propose(63)
    assert draft is not None
    at = draft.token_ids.index(2)
    assert (7, at) in pairs(draft), "corpus saw the context with the span behind it"


def test_a_guess_fills_the_gap_between_two_spans_in_one_draft():
    acceptance = Acceptance()
    for source in ("grammar", "mtp"):
        for depth in range(3):
            for _ in range(20):
                acceptance.add(source, 0, depth, True)
    spans = {0: [1, 2], 3: [4, 5]}  # what is forced behind an id
    forced = ScriptedSource(
        "grammar", lambda context, limit: Draft.chain(spans[context[-1]], "grammar") if context[-1] in spans else None
    )
    value = ScriptedSource("mtp", lambda context, limit: Draft.chain([3], "mtp") if context[-1] == 2 else None)
    drafter = TreeSources([value, forced], vocab_size=10, acceptance=acceptance)
    drafter.begin([0])
    draft = drafter.propose(63)
    assert draft is not None
    assert (draft.token_ids, draft.is_chain) == ((1, 2, 3, 4, 5), True)
    assert drafter.propose(4).token_ids == (1, 2, 3, 4)  # type: ignore[union-attr]


def test_a_declined_proposal_is_judged_by_what_is_emitted():
    acceptance, source = Acceptance(), says("corpus", 1, 2)
    drafter = TreeSources([source], vocab_size=10, gate=Gate(), acceptance=acceptance)
    drafter.begin([0])
    for _ in range(30):
        assert drafter.propose(8) is None, "no plain forward has been measured"
        drafter.commit([1])
        drafter.begin([0])
    assert acceptance.probability("corpus", 0, 0) > 0.9
    assert source.counters.proposed == 0
    assert drafter.report["declined"] == {"corpus": 60}


def test_sources_that_take_too_long_are_asked_less_often():
    now = 0.0

    def slow(context: list[int], limit: int) -> Draft | None:
        nonlocal now
        now += 0.001
        return None

    source = ScriptedSource("corpus", slow)
    drafter = TreeSources([source], vocab_size=10, gate=Gate(), clock=lambda: now)
    simulate(drafter, [0], [1] * 600, 500, linear(0.3))
    assert now < 0.001 * (500 / ASKED_EVERY + 40)
    drafter = TreeSources([source], vocab_size=10, gate=Gate(), clock=lambda: 0.0)
    before = now
    simulate(drafter, [0], [1] * 600, 500, linear(0.3))
    assert now - before > 0.4


def test_merged_sources_are_as_good_as_the_best_of_them():
    truth = [*range(50)] * 20

    def part(name: str, low: int, high: int) -> ScriptedSource:
        """Right where the next id lies in a range, wrong elsewhere."""

        def script(context: list[int], limit: int) -> Draft | None:
            ids = truth[len(context) : len(context) + 8]
            right = low <= ids[0] < high
            return Draft.chain(ids if right else [(i + 1) % 50 for i in ids], name, 5 if right else 3)

        return ScriptedSource(name, script)

    def seconds(*sources: ScriptedSource) -> float:
        drafter = TreeSources(sources, vocab_size=50, gate=Gate(), clock=lambda: 0.0)
        return simulate(drafter, truth[:3], truth, 500, linear(0.2)).seconds

    alone = [seconds(part("grammar", 0, 20)), seconds(part("corpus", 10, 35)), seconds(part("ngram", 30, 50))]
    together = seconds(part("grammar", 0, 20), part("corpus", 10, 35), part("ngram", 30, 50))
    assert together < min(alone)


def test_which_sources_and_merges_a_gate_means(tmp_path: Path):
    (tmp_path / "corpus.txt").write_text("1 2 3 4 5 6 7 8 9")
    library = SourceLibrary(100, lambda: "", lambda line: None)

    def sources(**settings: object) -> MergedSources | TreeSources:
        return library.sources(DraftOptions(corpus=tmp_path / "corpus.txt", **settings))  # type: ignore[arg-type]

    auto = sources(gate="auto")
    assert isinstance(auto, TreeSources)
    assert [source.name for source in auto.sources] == ["corpus", "ngram"], "unset, n-grams are the gate's to decide"
    assert [source.name for source in sources(gate="auto", draft=0).sources] == ["corpus"]
    assert [source.name for source in sources(gate="seed").sources] == ["corpus"]
    assert isinstance(sources(gate="seed", draft=4), MergedSources)
    assert isinstance(sources(gate="always"), MergedSources)
    assert isinstance(sources(gate="always", draft=4), TreeSources)
    assert library.sources(DraftOptions(enabled=False, gate="auto")).sources == ()


@pytest.fixture(scope="module")
def plain_ids() -> Iterator[list[int]]:
    with LLM.open(container("olmoe-base", "q8"), EngineOptions(), lambda line: None) as llm:
        yield list(llm.generate(PROMPT, options(), DraftOptions(enabled=False)).result.token_ids)


def options(tokens: int = 120) -> GenerateOptions:
    return GenerateOptions(tokens, ignore_eos=True, sampler=SamplerOptions(temperature=0.7, seed=3))


def test_gate_auto_changes_no_id_and_keeps_its_costs(tmp_path: Path, plain_ids: list[int]):
    (tmp_path / "corpus.txt").write_text(" ".join(map(str, plain_ids)))
    drafts = DraftOptions(corpus=tmp_path / "corpus.txt", gate="auto")
    file = tmp_path / "gate.json"
    for engine in (EngineOptions(gate_file=file), EngineOptions(gate_file=file, cap=2), EngineOptions(gate_file=file)):
        notices: list[str] = []
        with LLM.open(container("olmoe-base", "q8"), engine, notices.append) as llm:
            result = llm.generate(PROMPT, options(), drafts).result
        assert list(result.token_ids) == plain_ids
        detail = json.loads(json.dumps(result.report["drafting"]))
        assert result.report["gate"] == "auto"
        assert result.report["forwards"] == sum(detail["rows"].values())
        assert detail["declined_forwards"] + detail["drafted"] > 0
        assert not [line for line in notices if "gate.json" in line]
    entries = json.loads(file.read_text())["entries"]
    assert len(entries) == 2, "with and without room for all experts"
    assert {entry["container"] for entry in entries} == {entries[0]["container"]}


@pytest.mark.parametrize("switch", ["gate_save", "usage_save"])
def test_a_read_only_run_writes_no_costs(tmp_path: Path, switch: str):
    engine = EngineOptions(gate_file=tmp_path / "gate.json", **{switch: False})  # type: ignore[arg-type]
    with LLM.open(container("olmoe-base", "q8"), engine, lambda line: None) as llm:
        assert llm.generate(PROMPT, options(40), DraftOptions(draft=8, gate="auto")).result.token_ids
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_refused_if_named_and_left_alone_if_found(tmp_path: Path):
    file = tmp_path / "gate.json"
    file.write_text("not json")
    drafts = DraftOptions(draft=8, gate="auto")
    with (
        LLM.open(container("olmoe-base", "q8"), EngineOptions(gate_file=file), lambda line: None) as llm,
        pytest.raises(OptionError, match=r"gate\.json"),
    ):
        llm.generate(PROMPT, options(8), drafts)
    notices: list[str] = []
    beside = EngineOptions(usage=tmp_path / "usage.json")
    with LLM.open(container("olmoe-base", "q8"), beside, notices.append) as llm:
        assert len(llm.generate(PROMPT, options(40), drafts).result.token_ids) == 40
    assert sum("gate.json" in line and "not used" in line for line in notices) == 1
    assert file.read_text() == "not json"
