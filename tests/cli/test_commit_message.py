import pytest
from cli.scripts import load

problem = load("check_commit_message").problem

GOOD = [
    "store: keep pinned experts out of the LRU",
    "text: encode\n\nbecause",
    "cli, options: do both\n\n# git's comment",
    "\nci: run",
    "Merge branch 'x'",
    "kernels: use AVX2",
]
BAD = [
    "",
    "# only comments",
    "no area",
    "Store: keep it",
    "store: keep it.",
    "store:keep it",
    "store: Keep it",
    "store: adds a thing",
    "store: fixed it",
    "store: keep it\nbody without an empty line",
    "store: " + "x" * 120,
]


@pytest.mark.parametrize("message", GOOD)
def test_message_in_form_passes(message):
    assert problem(message) is None


@pytest.mark.parametrize("message", BAD)
def test_message_out_of_form_is_refused_with_a_reason(message):
    assert problem(message)
