"""Drafts change nothing: ids equal the slow loop's, and answers follow the law enumerated over all sequences."""

import pytest
from exactness import (
    SAMPLERS,
    check_any_draft_gives_the_slow_loop_s_ids,
    check_limits_inside_accepted_runs,
    check_sequences_follow_the_enumerated_law,
)

from coli.options import SamplerOptions

CHAINS = [
    SamplerOptions(temperature=1.0),
    SamplerOptions(temperature=1.7, top_k=2),
    SamplerOptions(temperature=0.8, top_p=0.85, min_p=0.05),
    SamplerOptions(temperature=1.0, repeat_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.8),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=range(len(SAMPLERS)))
@pytest.mark.parametrize("salt", [0, 1])
def test_any_draft_gives_the_ids_of_the_slow_loop(sampler: SamplerOptions, salt: int) -> None:
    check_any_draft_gives_the_slow_loop_s_ids(sampler, salt=salt)


def test_limits_hold_inside_accepted_runs() -> None:
    check_limits_inside_accepted_runs()


@pytest.mark.parametrize("sampler", CHAINS, ids=range(len(CHAINS)))
def test_sequences_follow_the_law_enumerated_over_all_of_them(sampler: SamplerOptions) -> None:
    check_sequences_follow_the_enumerated_law(sampler)
