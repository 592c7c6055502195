"""Sampler: the documented law, by enumeration; a token depends on logits, settings, seed and position alone."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from slow_decode import chi_square_excess, gumbel, law

from coli.engine.sampling import Sampler
from coli.errors import NumericError
from coli.options import SamplerOptions

LOGITS = np.array([1.5, -0.5, 2.0, 0.25, 2.0, -3.0], np.float32)  # ids 2 and 4 tie
PROMPT, ANSWER = [2, 2, 5], [4, 1, 4, 4]
DRAWS = 8_000
CHAINS = [
    SamplerOptions(temperature=1.0),
    SamplerOptions(temperature=0.4),
    SamplerOptions(temperature=3.0),
    SamplerOptions(temperature=1.0, top_k=1),
    SamplerOptions(temperature=1.0, top_k=3),
    SamplerOptions(temperature=1.0, top_k=50),
    SamplerOptions(temperature=1.0, top_p=0.5),
    SamplerOptions(temperature=1.0, top_p=0.9),
    SamplerOptions(temperature=1.0, top_p=0.0),
    SamplerOptions(temperature=1.0, min_p=0.3),
    SamplerOptions(temperature=1.7, top_k=5, top_p=0.8, min_p=0.2),
    SamplerOptions(temperature=1.0, repeat_penalty=1.5),
    SamplerOptions(temperature=1.0, presence_penalty=0.7),
    SamplerOptions(temperature=1.0, frequency_penalty=0.4),
    SamplerOptions(temperature=1.0, repeat_penalty=0.6, presence_penalty=-0.5, frequency_penalty=-0.2),
    SamplerOptions(temperature=0.8, top_k=4, top_p=0.95, min_p=0.05, repeat_penalty=1.2, frequency_penalty=0.3),
]


def sampler(settings: SamplerOptions, seed: int = 0, answer: list[int] | None = None) -> Sampler:
    made = Sampler(settings, seed, len(LOGITS))
    made.begin(PROMPT[:1], PROMPT[1:])
    for token_id in ANSWER if answer is None else answer:
        made.commit(token_id)
    return made


@pytest.mark.parametrize("settings", CHAINS, ids=range(len(CHAINS)))
def test_frequencies_follow_the_enumerated_law(settings: SamplerOptions) -> None:
    wanted = law(LOGITS.tolist(), settings, PROMPT, ANSWER)
    chosen = sampler(settings, seed=1)
    over_positions = Counter(chosen.sample(LOGITS, position) for position in range(DRAWS))
    over_seeds = Counter(sampler(settings, seed).sample(LOGITS, 7) for seed in range(DRAWS // 4))
    assert chi_square_excess(over_positions, wanted) < 1
    assert chi_square_excess(over_seeds, wanted) < 1


@pytest.mark.parametrize("settings", CHAINS, ids=range(len(CHAINS)))
def test_every_draw_is_the_best_of_log_probability_plus_noise(settings: SamplerOptions) -> None:
    chances = law(LOGITS.tolist(), settings, PROMPT, ANSWER)
    chosen = sampler(settings, seed=2**63 + 9)
    for position in [*range(200), 2**33 + 1]:
        noisy = {i: np.log(p) + gumbel(2**63 + 9, position, i) for i, p in chances.items()}
        assert chosen.sample(LOGITS, position) == max(noisy, key=lambda i: noisy[i])


def test_the_bound_refutes_a_law_that_is_slightly_off() -> None:
    settings = SamplerOptions(temperature=0.8, top_p=0.95, frequency_penalty=0.3)
    counts = Counter(sampler(settings).sample(LOGITS, position) for position in range(DRAWS))
    for off in (
        replace(settings, temperature=0.95),
        replace(settings, top_p=0.8),
        replace(settings, top_p=1.0),
        replace(settings, frequency_penalty=0.2),
        replace(settings, min_p=0.2),
    ):
        assert chi_square_excess(counts, law(LOGITS.tolist(), off, PROMPT, ANSWER)) > 1, off


@pytest.mark.parametrize("step", [1, 2, 2**32])
@pytest.mark.parametrize("what", ["position", "seed"])
def test_neighbouring_positions_and_seeds_are_independent(what: str, step: int) -> None:
    settings, start = SamplerOptions(temperature=1.5), 2**40
    single = law(LOGITS.tolist(), settings)
    if what == "position":
        chosen = sampler(settings, seed=start, answer=[])
        at = {i: chosen.sample(LOGITS, i) for base in (0, step) for i in range(base, base + 4000)}
    else:
        at = {
            i: sampler(settings, seed=i, answer=[]).sample(LOGITS, 3)
            for base in (0, step)
            for i in range(base, base + 4000)
        }
    pairs = Counter((at[i], at[i + step]) for i in range(4000))
    joint = {(a, b): single[a] * single[b] for a, b in itertools.product(single, single)}
    assert chi_square_excess(pairs, joint) < 1


def test_a_draw_does_not_depend_on_the_draws_before_it() -> None:
    settings = SamplerOptions(temperature=1.2, top_k=5)
    in_order = sampler(settings, seed=4)
    forth = [in_order.sample(LOGITS, position) for position in range(100)]
    other = sampler(settings, seed=4)
    back = [other.sample(LOGITS, position) for position in reversed(range(100)) for _ in range(2)]
    assert back[::-2] == forth
    assert [sampler(settings, seed=5).sample(LOGITS, position) for position in range(100)] != forth


def test_same_seed_same_ids_whatever_its_size() -> None:
    settings = SamplerOptions(temperature=1.0)
    runs = {}
    for seed in (0, 1, 2**32, 2**63, 2**64 - 1):
        runs[seed] = [sampler(settings, seed).sample(LOGITS, position) for position in range(60)]
        assert [sampler(settings, seed).sample(LOGITS, position) for position in range(60)] == runs[seed]
    assert len({tuple(ids) for ids in runs.values()}) == len(runs)


# --- temperature 0


@pytest.mark.parametrize(
    ("logits", "best"),
    [([0.0, 3.0, 1.0, 3.0], 1), ([-0.0, 0.0, -0.0], 0), ([-5.0, -5.0], 0), ([-np.inf, -np.inf, -7.0], 2)],
)
def test_temperature_0_is_argmax_with_the_lowest_id_on_ties(logits: list[float], best: int) -> None:
    for seed in range(5):
        chosen = Sampler(SamplerOptions(), seed, len(logits))
        assert {chosen.sample(np.array(logits, np.float32), position) for position in range(20)} == {best}


def test_temperature_0_ignores_cuts_and_obeys_penalties() -> None:
    settings = SamplerOptions(top_k=1, top_p=0.1, min_p=0.9, presence_penalty=0.25)
    assert sampler(settings, answer=[2]).sample(LOGITS, 0) == 4
    assert sampler(settings, answer=[2, 4]).sample(LOGITS, 0) == 2  # the tie is back, lower by a quarter


@pytest.mark.parametrize("temperature", [1e-3, 1e-7, 1e-20, 1e-38, 1e-45, 1e-60])
@pytest.mark.parametrize("cuts", [{}, {"top_p": 0.9}, {"top_k": 3, "min_p": 0.1}])
def test_a_temperature_near_0_takes_the_best_token(temperature: float, cuts: dict[str, float]) -> None:
    logits = np.array([1.0, 2.0, 2.1, -3.0, 0.0], np.float32)
    chosen = Sampler(SamplerOptions(temperature=temperature, **cuts), 3, 5)
    assert {chosen.sample(logits, position) for position in range(50)} == {2}


# --- penalties


def test_repeat_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer() -> None:
    logits = np.array([4.0, -4.0, 3.0, -2.0, 1.9, -1.1], np.float32)
    chosen = Sampler(SamplerOptions(repeat_penalty=2.0), 0, 6)
    chosen.begin([0], [])
    assert chosen.sample(logits, 0) == 2  # 4 -> 2
    chosen.begin([], [0])
    chosen.commit(2)
    assert chosen.sample(logits, 0) == 0  # 3 -> 1.5, once
    chosen.commit(2)
    assert chosen.sample(logits, 0) == 0
    low = np.array([-1.0, -1.5, -1.9, -9.0, -9.0, -9.0], np.float32)
    chosen.begin([], [0])
    assert chosen.sample(low, 0) == 1  # -1 -> -2, away from the best


def test_presence_counts_once_and_frequency_each_time_and_neither_the_prompt() -> None:
    logits = np.array([1.0, 0.0, -10.0], np.float32)
    once = Sampler(SamplerOptions(presence_penalty=0.6), 0, 3)
    once.begin([0, 0], [0, 0])
    assert once.sample(logits, 0) == 0
    for _ in range(5):
        once.commit(0)
        assert once.sample(logits, 0) == 0  # 0.4 left, however often
    each = Sampler(SamplerOptions(frequency_penalty=0.6), 0, 3)
    each.begin([0, 0], [0, 0])
    each.commit(0)
    assert each.sample(logits, 0) == 0
    each.commit(0)
    assert each.sample(logits, 0) == 1


def test_begin_forgets_the_earlier_response() -> None:
    for settings in (SamplerOptions(repeat_penalty=2.0), SamplerOptions(frequency_penalty=5.0)):
        chosen = sampler(settings, answer=[2, 4, 2, 4])
        chosen.begin([], [])
        assert chosen.sample(LOGITS, 0) == 2


@pytest.mark.parametrize("settings", [CHAINS[0], CHAINS[10], CHAINS[15], SamplerOptions(repeat_penalty=3.0)])
def test_the_caller_s_logits_are_left_alone(settings: SamplerOptions) -> None:
    logits = LOGITS.copy()
    logits.setflags(write=False)
    sampler(settings).sample(logits, 0)
    assert np.array_equal(logits, LOGITS)


# --- damaged logits


@pytest.mark.parametrize("settings", [*CHAINS, SamplerOptions(), SamplerOptions(repeat_penalty=1.1)])
@pytest.mark.parametrize("at", [[0], [2], [5], [0, 1, 2, 3, 4, 5]])
def test_a_nan_logit_stops_the_run_and_names_the_position(settings: SamplerOptions, at: list[int]) -> None:
    logits = LOGITS.copy()
    logits[at] = np.nan
    with pytest.raises(NumericError, match="position 41"):
        sampler(settings).sample(logits, 41)


@pytest.mark.parametrize("settings", CHAINS, ids=range(len(CHAINS)))
def test_an_infinite_logit_never_wins_by_accident(settings: SamplerOptions) -> None:
    logits = LOGITS.copy()
    logits[[1, 2]] = -np.inf
    drawn = {sampler(settings, seed).sample(logits, 0) for seed in range(200)}
    assert drawn
    assert not drawn & {1, 2}
