"""The gate on simulated machines: never much slower than plain decoding, fast where drafts pay, calm in between."""

import random
from collections.abc import Sequence

import pytest
from drafts.adversarial import ScriptedSource, every_adversary, perfect, wrong_at_every_depth
from drafts.simulated_machine import Machine, Outcome, linear, noisy, preparing, simulate

from coli.drafts.base import Draft
from coli.drafts.costs import RowCosts
from coli.drafts.gate import Gate
from coli.drafts.gated import TreeSources
from coli.engine.engine import SharedForward

PROMPT = [1, 2, 3]
TOKENS = 500
TRUTH = PROMPT + [random.Random(4).randrange(50) for _ in range(TOKENS + 80)]


def near_miss(share: float, seed: int = 1) -> ScriptedSource:
    """Eight ids of which the first is right with probability `share`, the others never."""
    rng = random.Random(seed)

    def script(context: list[int], limit: int) -> Draft | None:
        ids = list(TRUTH[len(context) : len(context) + 8])
        wrong = [(token_id + 1) % 50 for token_id in ids]
        return Draft.chain([ids[0], *wrong[1:]] if rng.random() < share else wrong, "corpus", 3)

    return ScriptedSource("corpus", script)


def run(
    sources: Sequence[ScriptedSource], machine: Machine, tokens: int = TOKENS, gate: Gate | None = None
) -> tuple[Outcome, TreeSources]:
    drafter = TreeSources(sources, vocab_size=50, gate=gate or Gate(), clock=lambda: 0.0)
    outcome = simulate(drafter, PROMPT, TRUTH, tokens, machine)
    assert outcome.emitted == TRUTH[len(PROMPT) :][:tokens]
    return outcome, drafter


def plain_seconds(machine: Machine, tokens: int = TOKENS) -> float:
    return sum(machine(1, at) for at in range(tokens - 1))


MACHINES = {"cheap": 0.05, "resident": 0.33, "streaming": 0.8, "no gain at all": 1.0}


@pytest.mark.parametrize("per_row", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_near_misses_cost_less_than_three_percent(per_row: float, share: float):
    outcome, _ = run([near_miss(share)], preparing(linear(per_row)))
    assert outcome.seconds <= 1.03 * plain_seconds(preparing(linear(per_row)))


@pytest.mark.parametrize("per_row", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("number", range(11))
def test_no_adversary_costs_three_percent(per_row: float, number: int):
    source = every_adversary(TRUTH, 50, end_id=0)[number]
    outcome, _ = run([source], preparing(linear(per_row)))
    assert outcome.seconds <= 1.03 * plain_seconds(preparing(linear(per_row))), source.name


@pytest.mark.parametrize("seed", range(8))
def test_a_noisy_machine_does_not_open_the_gate_for_good(seed: int):
    machine = noisy(linear(0.33), seed)
    outcome, drafter = run([near_miss(0.1, seed)], machine)
    assert drafter.gate is not None
    assert drafter.gate.counts.drafted <= 25
    assert outcome.forwards >= 470


@pytest.mark.parametrize(("per_row", "wanted"), [(0.05, 4.0), (0.33, 2.0), (0.8, 1.1)])
def test_a_perfect_source_gains(per_row: float, wanted: float):
    outcome, _ = run([perfect(TRUTH, 16)], preparing(linear(per_row)))
    assert plain_seconds(linear(per_row)) / outcome.seconds >= wanted


def test_a_perfect_source_gains_on_a_noisy_machine():
    drafted = sum(run([perfect(TRUTH, 16)], noisy(preparing(linear(0.33)), seed))[0].seconds for seed in range(8))
    assert sum(plain_seconds(noisy(linear(0.33), seed)) for seed in range(8)) / drafted >= 1.7


def test_depth_follows_the_costs():
    def drafted(per_row: float) -> int:
        _, drafter = run([perfect(TRUTH)], linear(per_row))
        rows = drafter.report["rows"]
        return max(map(int, rows), key=lambda count: rows[str(count)] * (count - 1))

    assert drafted(0.05) > 16
    steps = preparing(lambda rows, at: 0.01 if rows == 1 else 0.02 if rows <= 4 else 0.01 * rows)
    _, drafter = run([perfect(TRUTH)], steps)
    rows = drafter.report["rows"]
    assert max(rows, key=lambda count: rows[count]) == "4", rows


def test_costs_that_rise_close_the_gate_and_costs_that_fall_open_it_again():
    dear, cheap = linear(1.2), linear(0.1)

    def machine(rows: int, at: int) -> float:
        return cheap(rows, at) if at < 60 or at > 260 else dear(rows, at)

    outcome, drafter = run([wrong_at_every_depth(TRUTH, 50, 6)], machine, tokens=570)
    assert drafter.gate is not None
    assert outcome.seconds < 1.03 * 5.7
    assert drafter.report["rows"]["1"] >= 100, "plain while rows were dear"
    assert drafter.gate.counts.drafted >= 60, "and drafted before and after"


def test_a_closed_gate_opens_after_plain_windows():
    gate = Gate()
    for _ in range(5):
        gate.measured(1, 1, 0.01, 0)
    for _ in range(10):
        gate.measured(4, 1, 0.04, 0)
    assert gate.is_closed
    assert gate.choose([0.99] * 8) == 0
    forwards = 0
    while gate.is_closed:
        gate.measured(1, 1, 0.01, 0)
        forwards += 1
    assert 100 <= forwards <= 200


def test_small_changes_do_not_make_it_flap():
    def settled(first: float) -> tuple[Gate, list[bool]]:
        costs = RowCosts()
        for _ in range(20):
            costs.add(1, 0.01, 0)
            costs.add(2, 0.015, 0)
        gate = Gate(costs)
        gate.measured(2, 2, 0.015, 0)
        gate.choose([first])
        chosen = []
        for step in range(40):
            size = gate.choose([0.57 if step % 2 else 0.60])  # 1.047 and 1.067 plain forwards
            chosen.append(size > 0)
            gate.measured(1 + size, 1 + size, 0.01 * (1.5 if size else 1), 0)
        return gate, chosen

    assert all(settled(0.9)[1]), "drafting goes on"
    assert not any(settled(0.1)[1]), "and does not begin"


def test_probes_are_few():
    _, drafter = run([perfect(TRUTH, 8)], linear(1.0))
    assert drafter.gate is not None
    assert drafter.gate.counts.probes <= 40
    assert drafter.gate.counts.drafted <= 40


def test_remembered_costs_spare_the_probes():
    remembered = RowCosts()
    for rows in range(1, 18):
        remembered.remember(rows, 1 + 0.9 * (rows - 1), 0)
    _, drafter = run([near_miss(0.7)], linear(0.9), gate=Gate(remembered))
    assert drafter.gate is not None
    assert drafter.gate.counts.drafted == drafter.gate.counts.probes <= 3


def test_a_plain_forward_is_measured_now_and_then():
    _, drafter = run([perfect(TRUTH, 1)], linear(0.05))
    assert drafter.gate is not None
    assert drafter.gate.counts.refreshes >= 3


def test_expert_bytes_saved_and_wasted_are_told_apart():
    gate = Gate()
    for _ in range(3):
        gate.measured(1, 1, 0.01, 1000)
    gate.measured(4, 4, 0.02, 2500)
    gate.measured(4, 1, 0.02, 2500)
    assert (gate.counts.bytes_saved, gate.counts.bytes_wasted) == (1500, 1500)


def test_the_report_is_json_and_text():
    _, drafter = run([perfect(TRUTH, 8)], preparing(linear(0.2)))
    report = drafter.report
    assert report["drafted"] + report["plain"] + report["declined_forwards"] <= sum(report["rows"].values())
    assert sum(report["accepted_depth"].values()) == report["drafted"]
    lines = drafter.report_lines()
    for start in ("drafts: perfect", "gate: ", "gate: tokens declined", "gate: accepted per", "gate: cost of rows"):
        assert any(line.startswith(start) for line in lines), start


def test_a_preparation_is_charged_what_it_takes():
    """Where a new row count costs eleven plain forwards, only one is prepared for before drafts have gained."""
    machine = preparing(linear(0.33), 11)
    outcome, drafter = run([near_miss(0.9)], machine)
    assert len(drafter.report["rows"]) <= 3
    assert outcome.seconds <= 1.03 * plain_seconds(preparing(linear(0.33), 11))
    gaining, _ = run([perfect(TRUTH, 8)], preparing(linear(0.33), 11))
    assert gaining.seconds < 0.8 * outcome.seconds


def shared(gate: Gate, responses: int, machine: Machine, chance: float, forwards: int) -> list[int]:
    """Sizes a response's gate chooses while all responses draft alike, a drafted id right with probability `chance`."""
    rng, sizes = random.Random(5), []
    served = [gate.begin() for _ in range(responses)]
    for at in range(forwards):
        size = gate.serving(served[0], responses).choose([chance**depth for depth in range(1, 9)])
        right = 0
        for _ in range(responses):
            accepted = 0
            while accepted < size and rng.random() < chance:
                accepted += 1
            right += accepted
        rows = responses * (1 + size)
        forward = SharedForward(responses, rows, responses + right, machine(rows, at))
        for each in served:
            gate.serving(each, responses).measured_shared(forward, 0)
        sizes.append(size)
    return sizes


@pytest.mark.parametrize("responses", [1, 4])
def test_drafts_are_worth_less_among_many(responses: int):
    """A row costs half a plain forward: alone 1.8 tokens for 1.5, among four 0.2 tokens each for a fifth of theirs."""
    sizes = shared(Gate(), responses, linear(0.5), 0.8, 400)
    drafting = sum(size > 0 for size in sizes[100:]) / 300
    assert drafting > 0.9 if responses == 1 else drafting < 0.15


def test_drafts_that_pay_among_many_are_drafted():
    """Rows are nearly free, as where all experts are read anyway."""
    sizes = shared(Gate(), 4, linear(0.03), 0.9, 200)
    assert sum(size > 0 for size in sizes[100:]) > 90


def test_a_shared_forward_counts_once_and_apart():
    gate = Gate()
    last = shared(gate, 3, linear(0.05), 0.9, 50)
    assert gate.costs.table() == []
    together = gate.report()["together"]["3"]
    assert together["drafted"] == 0, "the last of the three left the choice to the first"
    assert 0 < together["seconds_gained"] < sum(size > 0 for size in last) * 0.01 * 9 / 3, "a third of all gains"
    assert together["costs"][0]["seconds"] == pytest.approx(0.01 * 1.1), "a plain forward of three rows"


def test_a_response_that_begins_leaves_the_counts_of_one_that_runs():
    """Responses of one server share the gate: what each drafted, gained and prepared for is its own."""
    gate = Gate()
    first, second = (TreeSources([perfect(TRUTH, 8)], vocab_size=50, gate=gate, clock=lambda: 0.0) for _ in range(2))
    simulate(first, PROMPT, TRUTH, 200, linear(0.1))
    before = first.report
    assert before["drafted"] > 10
    assert before["seconds_gained"] > 0
    second.begin(PROMPT)
    assert second.report["drafted"] == second.report["seconds_gained"] == 0
    assert first.report == before
    second.propose(8)
    second.measured(1, 1, 0.01)
    counted = ("plain", "declined_forwards", "drafted", "probes", "seconds_gained", "rows")
    assert {name: first.report[name] for name in counted} == {name: before[name] for name in counted}
