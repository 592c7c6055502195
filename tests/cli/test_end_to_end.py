"""The real thing on a tiny model: convert, run, report."""

import json
from pathlib import Path

import pytest
from containers import container, expected

from coli.text.tokenizer import Tokenizer

EXPECTED = expected("olmoe-base")
FIELDS = {
    *("text", "token_ids", "finish_reason", "seed", "prompt_tokens", "generated_tokens", "forwards", "gate", "drafts"),
    *("tokens_per_forward", "ttft_s", "prefill_tps", "decode_tps", "expert_hit_rate", "pinned_hit_rate", "time_s"),
    *("expert_bytes_read", "bytes_per_token", "reads", "major_faults", "peak_memory_bytes", "memory_budget_bytes"),
    *("settings", "bottleneck", "disk_bytes_per_s", "reading_bytes_per_s", "prefetch"),
}


@pytest.fixture(scope="module")
def olmoe() -> Path:
    return container("olmoe-base", "f32")


def ids_of(err: str) -> list[int]:
    (line,) = [line for line in err.splitlines() if line.startswith("[TOKENS] ")]
    count, _, ids = line.removeprefix("[TOKENS] ").partition(" generated:")
    assert int(count) == len(ids.split())
    return [int(token_id) for token_id in ids.split()]


def test_prompt_ids_give_the_reference_s_ids_and_their_text(coli, olmoe):
    prompt = ",".join(map(str, EXPECTED["prompt_ids"]))
    done = coli("run", "--model", olmoe, "--prompt-ids", prompt, "--ngen", 32, "--ignore-eos", "--tokens")
    assert done.status == 0
    assert ids_of(done.err) == EXPECTED["greedy_ids"]
    text = Tokenizer.load(olmoe).decode(EXPECTED["greedy_ids"])
    assert done.out == text + ("" if text.endswith("\n") else "\n")


def test_report_has_every_promised_field(coli, olmoe):
    report = json.loads(coli("run", "--model", olmoe, "--raw", "--ngen", 4, "--json", "-", EXPECTED["prompt"]).out)
    assert set(report) >= FIELDS
    assert report["prompt_tokens"] == len(EXPECTED["prompt_ids"])
    assert report["settings"]["ngen"] == {"value": 4, "from": "flag"}
    assert report["token_ids"] == EXPECTED["greedy_ids"][: len(report["token_ids"])]


def test_chat_template_is_used_and_special_tokens_of_the_user_are_text(coli, olmoe):
    def prompt_line(*args: str) -> list[str]:
        err = coli("run", "--model", olmoe, "--ngen", 1, "--tokens", *args).err
        return next(line for line in err.splitlines() if line.startswith("[PROMPT_TOKENS]")).split()[2:]

    assert prompt_line("hi")[0] == "328"  # <|user|>
    assert [i for i in prompt_line("<|endoftext|>", "<|user|>") if i in ("327", "328", "329")] == ["328", "329"]
    assert not {"327", "328", "329"} & set(prompt_line("--raw", "<|user|>hi"))


def test_prompt_longer_than_the_context_is_status_2_and_names_both_numbers(coli, olmoe):
    done = coli("run", "--model", olmoe, "--quiet", "--ctx", 8, "--prompt-ids", "1,2,3,4,5,6,7,8,9")
    assert (done.status, done.out) == (2, "")
    assert "9 tokens" in done.err
    assert " 8" in done.err
    assert done.err.count("\n") == 1


def test_context_that_fills_up_ends_with_length(coli, olmoe):
    args = ("run", "--model", olmoe, "--ctx", 8, "--prompt-ids", "1,2,3,4", "--ignore-eos")
    done = coli(*args)
    assert done.status == 0
    assert "ended by length (context full: 4 prompt tokens" in done.err


def test_empty_raw_prompt_is_status_2(coli, olmoe):
    done = coli("run", "--model", olmoe, "--raw", "--quiet", "")
    assert (done.status, done.out) == (2, "")


def test_same_seed_gives_the_same_bytes(coli, olmoe):
    args = ("run", "--model", olmoe, "--raw", "--ngen", 12, "--temp", "1.3", "--seed", 5, "--ignore-eos", "the river")
    first = coli(*args)
    assert first.status == 0
    assert coli(*args).out == first.out


def test_damaged_tokenizer_in_a_container_is_one_line_and_status_1(coli, olmoe, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in olmoe.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text("{")
    done = coli("run", "--model", folder, "--quiet", "hi")
    assert (done.status, done.out) == (1, "")
    assert done.err.count("\n") == 1
