"""The built-in model answers unseen samples exactly, through the engine."""

import sys
from pathlib import Path

import pytest

from coli.builtin import DEMO_MODEL
from coli.llm import LLM
from coli.options import EngineOptions

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import demo_match


@pytest.mark.slow
def test_nine_of_ten_unseen_samples_of_every_task_are_answered_exactly() -> None:
    with LLM.open(DEMO_MODEL, EngineOptions(pin="off", usage_save=False), lambda line: None) as llm:
        for task, share in demo_match.matches(llm, 20).items():
            assert share >= 0.9, task
