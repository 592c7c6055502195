"""`coli batch`: every row once, each with the bytes it has alone, whatever is killed, full, closed or malformed."""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")

PIPE_SIZE: int | None = getattr(fcntl, "F_SETPIPE_SZ", None)
NAMES = ("Anna Keller", "Bob Stone", "Chen Li", "Dara Quinn", "Elif Kaya")
BAD: tuple[bytes, ...] = (
    b"no json",
    b'{"custom_id": "\xff\xfe"}',
    b'{"custom_id": 7, "url": "/v1/completions", "body": {"prompt": "x"}}',
    b'{"custom_id": "row-0", "url": "/v1/completions", "body": {"prompt": "x"}}',
    b'{"custom_id": "other", "url": "/v1/completions", "body": {"prompt": "x", "model": "gpt-4"}}',
    b'{"custom_id": "stream", "url": "/v1/completions", "body": {"prompt": "x", "stream": true}}',
    b'{"custom_id": "field", "url": "/v1/completions", "body": {"prompt": "x", "colour": "red"}}',
    b'{"custom_id": "url", "url": "/v1/embeddings", "body": {"input": "x"}}',
    b'{"custom_id": "big", "url": "/v1/completions", "body": {"prompt": "' + b"word " * 200_000 + b'"}}',
    b'{"custom_id": "deep", "url": "/v1/completions", "body": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
)


def good(number: int, tokens: int) -> dict[str, Any]:
    text = f"order {4000 + number} by {NAMES[number % 5]} over {number}.90 is {'paid' if number % 2 else 'open'}."
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": tokens}
    return {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def write_rows(path: Path, count: int, bad: tuple[bytes, ...] = BAD, tokens: int = 12) -> Path:
    lines = [json.dumps(good(number, tokens)).encode() for number in range(count)]
    for number, line in enumerate(bad):
        lines.insert(count * number // max(len(bad), 1) + number + 1, line)
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def records(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert all(list(record) == ["id", "custom_id", "response", "error"] for record in found)
    assert all((record["response"] is None) is (record["error"] is not None) for record in found)
    return found


def answers(path: Path) -> dict[str, str]:
    """custom_id -> text, each once."""
    pairs = [
        (record["custom_id"], record["response"]["body"]["choices"][0]["message"]["content"])
        for record in records(path)
        if record["response"]
    ]
    assert len(pairs) == len(dict(pairs))
    return dict(pairs)


def alone(count: int, tokens: int = 12) -> dict[str, str]:
    """The same rows one at a time."""
    from coli.builtin import DEMO_MODEL
    from coli.llm import LLM
    from coli.options import DraftOptions, EngineOptions, GenerateOptions

    with LLM.open(DEMO_MODEL, EngineOptions(usage_save=False, gate_save=False), lambda line: None) as llm:
        texts = {}
        for number in range(count):
            row = good(number, tokens)
            ids = llm.prompt_ids(row["body"]["messages"][0]["content"])
            texts[row["custom_id"]] = llm.generate(
                ids, GenerateOptions(tokens), DraftOptions(enabled=False)
            ).result.text
        return texts


def batch(*arguments: object, limit: int | None = None, **more: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "coli", "batch", *map(str, arguments)]
    limits = (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) if limit else None
    return subprocess.run(command, capture_output=True, check=False, preexec_fn=limits, **more)


def test_each_row_is_answered_as_if_it_were_alone_and_bad_ones_are_recorded(coli, tmp_path):
    source, target, report = write_rows(tmp_path / "in", 9), tmp_path / "out", tmp_path / "report"
    done = coli("batch", source, "-o", target, "--json", report)
    assert done.status == 3, done.err
    assert answers(target) == alone(9)
    errors = [(record["custom_id"], record["error"]["code"]) for record in records(target) if record["error"]]
    assert sorted(errors, key=str) == sorted(
        [
            (None, "invalid_json"), (None, "invalid_utf8"), (None, "invalid_request"), ("row-0", "duplicate_custom_id"),
            ("other", "model_not_found"), ("stream", "invalid_request"), ("field", "unknown_field"),
            ("url", "invalid_request"), ("big", "context_length_exceeded"), (None, "invalid_json"),
        ],
        key=str,
    )  # fmt: skip
    counted = json.loads(report.read_text())
    assert (counted["rows"], counted["rows_answered"], counted["rows_with_errors"]) == (19, 9, 10)
    assert counted["answers_per_forward"] > 1.5


def test_a_finished_batch_is_left_alone_and_new_rows_are_added(coli, tmp_path):
    source, target = write_rows(tmp_path / "in", 3, ()), tmp_path / "out"
    assert coli("batch", source, "-o", target).status == 0
    before = target.read_bytes()
    assert coli("batch", source, "-o", target).status == 0
    assert target.read_bytes() == before
    write_rows(source, 5, ())
    assert coli("batch", source, "-o", target).status == 0
    assert target.read_bytes().startswith(before)
    assert answers(target) == alone(5)


def test_other_options_or_another_file_are_refused(coli, tmp_path):
    source, target = write_rows(tmp_path / "in", 2, ()), tmp_path / "out"
    assert coli("batch", source, "-o", target).status == 0
    before = target.read_bytes()
    for arguments in (["--temp", "0.5"], ["--ngen", "7"], ["--kv", "f32"]):
        done = coli("batch", source, "-o", target, *arguments)
        assert done.status == 2
        assert "2 of its 2 records are of other rows, another model or other options" in done.err
    assert target.read_bytes() == before
    assert coli("batch", source, "-o", source).status == 2
    target.write_text("my notes\n")
    done = coli("batch", source, "-o", target)
    assert done.status == 2
    assert "something else than records" in done.err
    assert target.read_text() == "my notes\n"
    target.write_text('{"mine": 1}')  # no line end: not a record that was cut off either
    assert coli("batch", source, "-o", target).status == 2
    assert target.read_text() == '{"mine": 1}'


def test_a_refused_start_leaves_the_file_as_it_is(coli, tmp_path):
    source, target = write_rows(tmp_path / "in", 3, BAD[:1]), tmp_path / "out"
    assert coli("batch", source, "-o", target).status == 3
    failed = {"id": "x", "custom_id": "y", "response": None, "error": {"code": "server_error"}}
    target.write_bytes(target.read_bytes() + json.dumps(failed).encode() + b'\n{"id": "half')
    before = target.read_bytes()
    assert coli("batch", source, "-o", target, "--ngen", "9").status == 2
    assert target.read_bytes() == before


def test_the_report_may_not_take_the_place_of_rows_or_answers(coli, tmp_path):
    source, target = write_rows(tmp_path / "in", 2, ()), tmp_path / "out"
    before = source.read_bytes()
    for path in (source, target):
        done = coli("batch", source, "-o", target, "--json", path)
        assert done.status == 2
        assert "choose another file" in done.err
    assert source.read_bytes() == before


@pytest.mark.parametrize("name", ["/dev/full", "/dev/null", "pipe"])
def test_answers_go_to_a_file_or_standard_output_only(coli, tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    done = coli("batch", write_rows(tmp_path / "in", 2, ()), "-o", tmp_path / name)
    assert done.status == 2
    assert "no regular file" in done.err


def test_a_link_to_the_answers_stays_one(coli, tmp_path):
    source, target, link = write_rows(tmp_path / "in", 2, ()), tmp_path / "out", tmp_path / "link"
    link.symlink_to(target)
    assert coli("batch", source, "-o", link).status == 0
    failed = {"id": "x", "custom_id": "y", "response": None, "error": {"code": "server_error"}}
    target.write_bytes(target.read_bytes() + json.dumps(failed).encode() + b"\n")
    target.chmod(0o600)
    assert coli("batch", source, "-o", link).status == 0
    assert link.is_symlink()
    assert len(records(target)) == 2
    assert target.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("left", [1, 40])
def test_what_a_kill_leaves_of_a_record_is_made_anew(coli, tmp_path, left):
    source, target = write_rows(tmp_path / "in", 3, ()), tmp_path / "out"
    assert coli("batch", source, "-o", target).status == 0
    lines = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(lines[:2]) + lines[2][:-left])
    assert coli("batch", source, "-o", target).status == 0
    assert target.read_bytes().startswith(b"".join(lines[:2]))
    assert answers(target) == alone(3)


def test_rows_that_failed_inside_are_tried_again(coli, tmp_path):
    source, target = write_rows(tmp_path / "in", 3, BAD[:1]), tmp_path / "out"
    assert coli("batch", source, "-o", target).status == 3
    found = records(target)
    failed = next(record for record in found if record["response"])
    failed["response"], failed["error"] = None, {"code": "server_error", "message": "x", "param": None}
    target.write_text("".join(json.dumps(record) + "\n" for record in found))
    assert coli("batch", source, "-o", target).status == 3
    assert answers(target) == alone(3)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_rows_may_ask_for_ids_grammars_and_temperatures(coli, tmp_path):
    rows = [
        {"custom_id": "ids", "url": "/v1/completions", "body": {"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 1}},
        good(1, 12) | {"custom_id": "json"},
        good(1, 12) | {"custom_id": "hot"},
    ]
    rows[1]["body"] = rows[1]["body"] | {"response_format": {"type": "json_object"}}
    rows[2]["body"] = rows[2]["body"] | {"temperature": 1.5, "seed": 3}
    source = tmp_path / "in"
    source.write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)))
    assert coli("batch", source, "-o", tmp_path / "out").status == 0
    by_id = {record["custom_id"]: record["response"]["body"] for record in records(tmp_path / "out")}
    assert len(by_id["ids"]["choices"][0]["logprobs"]["tokens"]) == 3
    assert by_id["json"]["choices"][0]["message"]["content"] == alone(2)["row-1"]
    assert by_id["hot"]["coli"]["seed"] == 3


def test_a_row_that_would_be_cut_short_here_only_is_refused(coli, tmp_path):
    source = write_rows(tmp_path / "in", 1, (), tokens=10**6)
    done = coli("batch", source, "-o", tmp_path / "out")
    (record,) = records(tmp_path / "out")
    if record["error"]:  # the model knows more positions than a slot has
        assert done.status == 3
        assert "give --ctx" in record["error"]["message"]


@pytest.mark.parametrize(("make", "words"), [("nothing", "no such file"), ("folder", "is a folder")])
def test_an_input_that_is_none_is_refused(coli, tmp_path, make, words):
    if make == "folder":
        (tmp_path / "in").mkdir()
    done = coli("batch", tmp_path / "in", "-o", tmp_path / "out")
    assert done.status == 2
    assert words in done.err
    assert not (tmp_path / "out").exists()


def test_a_closed_pipe_ends_it_quietly(tmp_path):
    """The pipe holds less than the records it is sent, so some are still to come when its reader leaves."""
    source = write_rows(tmp_path / "in", 300 if PIPE_SIZE is None else 40, (), tokens=1)
    reader, writer = os.pipe()
    if PIPE_SIZE is not None:
        fcntl.fcntl(writer, PIPE_SIZE, 4096)
    command = [sys.executable, "-m", "coli", "batch", str(source), "-o", "-"]
    process = subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        assert json.loads(pipe.readline())["error"] is None
    _, errors = process.communicate()
    assert process.returncode == 141
    assert b"Traceback" not in errors


def test_a_full_disk_leaves_whole_records_and_the_rest_comes_later(coli, tmp_path):
    source, target = write_rows(tmp_path / "in", 6, ()), tmp_path / "out"
    done = batch(source, "-o", target, limit=2500)
    assert done.returncode == 1
    assert b"give the same command again" in done.stderr
    assert b"Traceback" not in done.stderr
    there = len(records(target))
    assert 0 < there < 6
    assert coli("batch", source, "-o", target).status == 0
    assert answers(target) == alone(6)


@pytest.mark.slow
def test_500_rows_with_10_bad_ones_killed_twice_are_each_done_once(tmp_path):
    source, target = write_rows(tmp_path / "in", 490, tokens=24), tmp_path / "out"
    command = [sys.executable, "-m", "coli", "batch", str(source), "-o", str(target), "--slots", "8"]
    for share in (0.15, 0.4):  # of which far more is left than is done before the kill
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not target.exists() or target.read_bytes().count(b"\n") < share * 500:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not target.exists() or len(target.read_bytes().splitlines()) < 500
    done = batch(source, "-o", target, "--slots", "8")
    assert done.returncode == 3, done.stderr
    assert answers(target) == alone(490, 24)
    assert len(records(target)) == 500
    assert sum(record["error"] is not None for record in records(target)) == 10
