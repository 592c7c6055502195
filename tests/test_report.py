"""The sentence that names what a run spent its time on."""

import pytest

from coli.report import bottleneck

SHARES = {"disk_wait": 1.0, "experts": 1.0, "attention": 1.0, "other": 1.0}
KNOBS = {"disk_wait": "--ram, now 6.00 GB", "experts": "--threads is 2", "attention": "--kv f16", "other": "--draft"}


@pytest.mark.parametrize(("name", "knob"), KNOBS.items())
def test_the_largest_share_is_named_with_the_setting_that_changes_it(name, knob):
    line = bottleneck({**SHARES, name: 5.0}, 2, 6_000_000_000)
    assert "62% of the time" in line
    assert knob in line


def test_a_short_run_says_nothing():
    assert bottleneck(dict.fromkeys(SHARES, 0.1), 2, 1) == ""
