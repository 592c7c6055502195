"""How often a source is asked: bounded spaces while it is of no use, none from its first right answer on."""

from itertools import count, pairwise

from drafts.adversarial import ScriptedSource
from drafts.simulated_machine import linear, preparing, simulate

from coli.drafts.base import Draft
from coli.drafts.gate import Gate
from coli.drafts.gated import TreeSources
from coli.drafts.spacing import LONGEST_SPACE, Spacing


def test_spaces_double_up_to_the_longest_and_end_with_a_right_answer():
    spacing, emitted, asked = Spacing(), 0, []
    for emitted in range(200):
        if emitted >= spacing.due:
            asked.append(emitted)
            spacing.fruitless(emitted)
    spaces = [later - earlier for earlier, later in pairwise(asked)]
    assert spaces == sorted(spaces)
    assert (spaces[0], spaces[-1]) == (1, LONGEST_SPACE)
    spacing.fruitful()
    assert spacing.due == 0


def asked_at(right: range, drafting_s: float = 5e-5) -> list[int]:
    """Where a source is asked in a text of which it is right in `right` only; a plain forward takes 0.01 s."""
    truth, places = [1] * 700, []

    def script(context: list[int], limit: int) -> Draft | None:
        places.append(len(context))
        return Draft.chain([1 if len(context) in right else 2] * min(limit, 4), "corpus", 3)

    ticks = count()
    source = ScriptedSource("corpus", script)
    drafter = TreeSources([source], vocab_size=10, gate=Gate(), clock=lambda: drafting_s / 2 * next(ticks))
    simulate(drafter, [0], truth, 600, preparing(linear(0.3)))
    return places


def test_a_useless_source_is_asked_at_one_id_in_eight():
    assert len(asked_at(range(0))) < 600 / LONGEST_SPACE + 20


def test_a_text_that_begins_to_repeat_is_found_within_a_longest_space():
    places = asked_at(range(400, 1000))
    assert any(400 <= at < 400 + LONGEST_SPACE for at in places)
    late = [at for at in places if at >= 430]
    assert len(late) > 20, "asked at every forward from then on"
    assert max(later - earlier for earlier, later in pairwise(late)) <= 6


def test_where_asking_costs_next_to_nothing_every_forward_asks():
    assert len(asked_at(range(0), drafting_s=5e-6)) > 550
