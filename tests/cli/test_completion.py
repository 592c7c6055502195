"""Shells complete commands and options; no kernel is imported for it."""

import os
import subprocess
import sys

import pytest


def ask(instruction: str, words: str = "", number: int = 0) -> str:
    environment = {**os.environ, "_COLI_COMPLETE": instruction, "COMP_WORDS": words, "COMP_CWORD": str(number)}
    command = [sys.executable, "-m", "coli"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_for_a_shell(shell):
    assert "_COLI_COMPLETE" in ask(f"{shell}_source")


def test_commands_and_options_are_completed():
    assert {"plain,pull", "plain,plan"} <= set(ask("bash_complete", "coli p", 1).split())
    assert "plain,--ngen" in ask("bash_complete", "coli run --ng", 2).split()
