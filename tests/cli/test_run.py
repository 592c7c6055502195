import json
import math
import os
import re
import subprocess

import pytest

from coli.builtin import DEMO_MODEL
from coli.errors import CheckpointError, MemoryBudgetError, OptionError

SEED_PATTERN = r"s/.*\[TOKENS\][0-9 ]*generated://p"


def test_text_alone_on_stdout_with_one_final_newline(coli, fake, model):
    done = coli("run", "--model", model, "hi")
    assert (done.status, done.out) == (0, "Paris is é🙂\n")


@pytest.mark.parametrize(("pieces", "out"), [(["a\n"], "a\n"), (["a\n\n"], "a\n\n"), ([], "\n"), (["", "b"], "b\n")])
def test_final_newline_is_added_only_where_there_is_none(coli, fake, model, pieces, out):
    fake.pieces = pieces
    assert coli("run", "--model", model, "hi").out == out


def test_report_is_on_stderr_with_the_promised_lines(coli, fake, model):
    err = coli("run", "--model", model, "hi").err
    assert re.search(r"\b1\.33 tokens/forward", err)
    for part in ("34.50 tok/s", "98.5% hit rate", "1.00 MB read per token", "peak 2.00 GB of 6.00 GB", "coli: opened"):
        assert part in err
    assert "corpus drafts: 90% acceptance (9/10 proposed from 96 frozen ids)\n" in err


def test_quiet_leaves_stderr_empty(coli, fake, model):
    assert coli("run", "--model", model, "--quiet", "hi").err == ""


def test_verbose_lists_every_setting_and_its_origin(coli, fake, model, monkeypatch):
    monkeypatch.setenv("SEED", "5")
    err = coli("run", "--model", model, "--verbose", "--ngen", 9, "hi").err
    assert "setting: ngen = 9 (flag)" in err
    assert "setting: seed = 5 (environment SEED)" in err
    assert "setting: kv = auto (default)" in err


@pytest.mark.parametrize(("color", "escapes"), [("always", True), ("never", False), ("auto", False)])
def test_colour_only_where_it_is_wanted(coli, fake, model, color, escapes):
    assert ("\x1b[" in coli("run", "--model", model, "--color", color, "hi").err) is escapes


# --- where the prompt comes from


def test_arguments_are_joined_and_win_over_variable_and_stdin(coli, fake, model, monkeypatch):
    monkeypatch.setenv("PROMPT", "variable")
    coli("run", "--model", model, "What", "is", "this?", stdin=b"stdin")
    assert fake.calls["text"] == "What is this?"


def test_variable_wins_over_stdin(coli, fake, model, monkeypatch):
    monkeypatch.setenv("PROMPT", "variable")
    coli("run", "--model", model, stdin=b"stdin")
    assert fake.calls["text"] == "variable"


@pytest.mark.parametrize(("data", "text"), [(b"a b\n", "a b"), (b"a\n\n", "a\n"), (b" a", " a")])
def test_stdin_is_the_prompt_less_its_last_newline(coli, fake, model, data, text):
    coli("run", "--model", model, stdin=data)
    assert fake.calls["text"] == text


def test_dash_among_the_arguments_stands_for_stdin(coli, fake, model):
    coli("run", "--model", model, "Sum up:", "-", "Briefly.", stdin=b"the text\n")
    assert fake.calls["text"] == "Sum up: the text Briefly."


@pytest.mark.parametrize("stdin", [None, b"", b"\n"])
def test_no_prompt_at_all_is_status_2(coli, fake, model, stdin):
    done = coli("run", "--model", model, stdin=stdin)
    assert done.status == 2
    assert "no prompt" in done.err


def test_empty_variable_is_no_prompt(coli, fake, model, monkeypatch):
    monkeypatch.setenv("PROMPT", "")
    assert coli("run", "--model", model).status == 2


@pytest.mark.parametrize(("args", "stdin"), [(["-", "-"], b"x"), ([], b"\xff\xfe"), (["-"], b"a\x80")])
def test_prompt_that_cannot_be_is_one_line_and_status_2(coli, fake, model, args, stdin):
    done = coli("run", "--model", model, *args, stdin=stdin)
    assert done.status == 2
    assert done.err.count("\n") == 1


def test_argument_that_is_no_utf8_is_refused(coli, fake, model):
    done = coli("run", "--model", model, os.fsdecode(b"a\xff"))
    assert (done.status, done.err) == (2, "coli: the prompt: not UTF-8 text\n")


@pytest.mark.parametrize("flag", ["--stop", "--system"])
def test_settings_that_are_no_utf8_are_refused(coli, fake, model, flag):
    done = coli("run", "--model", model, flag, os.fsdecode(b"a\xff"), "hi")
    assert done.status == 2
    assert done.err.startswith(f"coli: {flag}: 'a?' is not allowed; allowed: UTF-8 text")


def test_prompt_ids_skip_template_and_stdin(coli, fake, model):
    assert coli("run", "--model", model, "--prompt-ids", "5,6,7", stdin=b"\xff").status == 0
    assert fake.calls["prompt_ids"] == [5, 6, 7]
    assert "text" not in fake.calls


def test_prompt_ids_outside_the_vocabulary_are_refused(coli, fake, model):
    done = coli("run", "--model", model, "--prompt-ids", "5,100")
    assert done.status == 2
    assert "100 is outside the vocabulary of 100 ids" in done.err


@pytest.mark.parametrize(
    "args",
    [
        ["--prompt-ids", "1", "text"],
        ["--prompt-ids", "1", "--system", "x"],
        ["--prompt-ids", "1", "--no-think"],
        ["--raw", "--system", "x", "text"],
        ["--raw", "--think", "text"],
    ],
)
def test_flags_that_would_change_nothing_are_refused(coli, fake, model, args):
    done = coli("run", "--model", model, *args)
    assert done.status == 2
    assert done.err.startswith(f"coli: {args[0]}: ")
    assert "generate" not in fake.calls


def test_template_settings_reach_the_model(coli, fake, model, monkeypatch):
    fake.template.knows_thinking = True
    monkeypatch.setenv("THINK", "0")
    assert "no effect" not in coli("run", "--model", model, "--system", "be brief", "hi").err
    assert (fake.calls["system"], fake.calls["think"], fake.calls["raw"]) == ("be brief", False, False)


def test_thinking_the_template_does_not_ask_for_is_noticed(coli, fake, model):
    assert "--no-think: the model's template does not ask" in coli("run", "--model", model, "--no-think", "hi").err


def test_model_without_template_completes_with_a_notice(coli, fake, model):
    fake.template = None
    assert "no chat template: plain completion" in coli("run", "--model", model, "hi").err
    assert "no chat template" not in coli("run", "--model", model, "--raw", "hi").err
    assert coli("run", "--model", model, "--system", "x", "hi").status == 2


# --- settings reach the engine


def test_flags_and_variables_become_options(coli, fake, model, monkeypatch):
    monkeypatch.setenv("NGEN", "31")
    monkeypatch.setenv("COLI_THREADS", "2")
    coli("run", "--model", model, "--temp", "0.5", "--stop", "a", "--stop", "b", "--no-drafts", "--ram", "6GiB", "hi")
    generate, engine = fake.calls["generate"], fake.calls["engine"]
    assert (generate.max_tokens, generate.stop, generate.sampler.temperature) == (31, ("a", "b"), 0.5)
    assert (engine.threads, engine.memory_budget_bytes) == (2, 6 * 2**30)
    assert not fake.calls["drafts"].enabled


def test_unknown_variable_is_one_line_and_bad_value_is_status_2(coli, fake, model, monkeypatch):
    monkeypatch.setenv("COLI_THREAD", "2")
    assert coli("run", "--model", model, "hi").err.count("COLI_THREAD:") == 1
    monkeypatch.setenv("NGEN", "many")
    done = coli("run", "--model", model, "hi")
    assert done.status == 2
    assert done.err.splitlines()[-1].startswith("coli: NGEN: 'many' is not allowed; allowed: a whole number")


# --- ids and reports


def test_tokens_lines_are_the_ones_the_seed_s_pipeline_cuts(coli, fake, model, monkeypatch):
    monkeypatch.setenv("TOKENS", "1")
    done = coli("run", "--model", model, "hi")
    assert done.err.endswith("[PROMPT_TOKENS] 3: 1 2 3\n[TOKENS] 4 generated: 10 11 12 13\n")
    both = (done.out + done.err).encode()
    frozen = subprocess.run(["sed", "-n", SEED_PATTERN], input=both, capture_output=True, check=True).stdout
    assert frozen == b" 10 11 12 13\n"


def test_tokens_flag_works_when_quiet(coli, fake, model):
    assert coli("run", "--model", model, "--tokens", "--quiet", "hi").err.startswith("[PROMPT_TOKENS] 3:")


def test_json_to_a_file_is_whole_and_text_stays_on_stdout(coli, fake, model, tmp_path):
    path = tmp_path / "report.json"
    path.write_text("old")
    assert coli("run", "--model", model, "--json", path, "--ngen", "5", "hi").out == "Paris is é🙂\n"
    report = json.loads(path.read_text())
    assert report["text"] == "Paris is é🙂"
    assert report["token_ids"] == [10, 11, 12, 13]
    assert report["settings"]["ngen"] == {"value": 5, "from": "flag"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "report.json"]


def test_json_to_stdout_holds_the_text(coli, fake, model):
    done = coli("run", "--model", model, "--json", "-", "hi")
    assert json.loads(done.out)["text"] == "Paris is é🙂"
    assert done.out.count("\n") == 1


def test_json_to_a_device_that_is_full_names_it(coli, fake, model):
    done = coli("run", "--model", model, "--quiet", "--json", "/dev/full", "hi")
    assert (done.status, done.err) == (1, "coli: /dev/full: No space left on device\n")


def test_numbers_json_does_not_have_never_reach_the_file(coli, fake, model, tmp_path):
    fake.report = {"ttft_s": math.nan}
    path = tmp_path / "report.json"
    assert coli("run", "--model", model, "--json", path, "hi").status == 1
    assert not path.exists()


@pytest.mark.parametrize("target", [".", "missing/report.json"])
def test_json_file_that_cannot_be_written_is_refused_before_the_work(coli, fake, model, tmp_path, target):
    done = coli("run", "--model", model, "--json", tmp_path / target, "hi")
    assert (done.status, done.out) == (2, "")
    assert "generate" not in fake.calls


@pytest.mark.parametrize(
    ("report", "ended"),
    [
        ({"finish_reason": "stop"}, "ended by stop"),
        ({"finish_reason": "length", "generated_tokens": 4}, "ended by length (--ngen 4)"),
        ({"finish_reason": "length", "generated_tokens": 3}, "ended by length (context full: 3 prompt tokens of 6)"),
    ],
)
def test_report_says_which_limit_ended_it(coli, fake, model, report, ended):
    fake.report = report
    assert ended in coli("run", "--model", model, "--ngen", "4", "hi").err


def test_report_of_a_dense_model_has_no_expert_line(coli, fake, model):
    fake.report = {"expert_hit_rate": None, "pinned_hit_rate": None}
    assert "hit rate" not in coli("run", "--model", model, "hi").err


# --- which model


def test_model_by_variable_and_by_name(coli, fake, model, monkeypatch, tmp_path):
    monkeypatch.setenv("COLI_HOME", str(tmp_path))
    monkeypatch.setenv("COLI_MODEL", "model")
    monkeypatch.chdir("/")
    assert coli("run", "hi").status == 0
    assert fake.calls["path"] == model


def test_without_a_model_the_one_inside_the_package_answers_and_is_named(coli, fake):
    done = coli("run", "hi")
    assert done.status == 0
    assert fake.calls["path"] == DEMO_MODEL
    assert done.err.splitlines()[0].startswith("coli: no --model: using the built-in demo model")
    assert "built-in" not in coli("run", "--quiet", "hi").err


def test_an_unknown_model_is_status_2(coli, fake, monkeypatch, tmp_path):
    monkeypatch.setenv("COLI_HOME", str(tmp_path))
    done = coli("run", "--model", "nothing", "hi")
    assert done.status == 2
    assert f"no model of that name under {tmp_path}" in done.err


def test_folder_that_is_not_converted_shows_the_line_to_type(coli, fake, tmp_path):
    done = coli("run", "--model", tmp_path, "hi")
    assert done.status == 2
    assert f"coli convert {tmp_path} {tmp_path}-coli" in done.err


# --- errors


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CheckpointError("file: tensor x: expected 1,\nfound 2"), 1),
        (OptionError("--ctx: too small"), 2),
        (MemoryBudgetError("needs 5 GB of 4"), 2),
        (OSError(28, "No space left on device", "f"), 1),
        (MemoryError(), 1),
        (ZeroDivisionError("a\nb"), 1),
        (RecursionError("deep"), 1),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
    ],
)
def test_errors_are_one_line_and_a_status(coli, fake, model, error, status):
    fake.error = error
    done = coli("run", "--model", model, "--quiet", "hi")
    assert done.status == status
    assert "Traceback" not in done.err
    assert done.err.count("\n") == (0 if status in (130, 141) else 1)


def test_debug_shows_the_traceback(coli, fake, model, monkeypatch):
    monkeypatch.setenv("COLI_DEBUG", "1")
    fake.error = ZeroDivisionError("x")
    err = coli("run", "--model", model, "hi").err
    assert "Traceback (most recent call last)" in err
    assert err.endswith("coli: internal error: ZeroDivisionError: x\n")


def test_control_characters_of_files_do_not_reach_the_terminal(coli, fake, model):
    fake.error = CheckpointError("tensor \x1b[2J\u2028name\r")
    assert coli("run", "--model", model, "--quiet", "hi").err == "coli: tensor \\x1b[2J\\x2028name\\x0d\n"
