import json
import shutil
from pathlib import Path

import pytest
from containers import container as converted

ORACLE = Path(__file__).parent.parent / "oracle"


@pytest.fixture
def container(tmp_path) -> Path:
    return Path(shutil.copytree(converted("olmoe-base", "f32"), tmp_path / "container"))


def test_facts_equal_the_files(coli, container):
    done = coli("info", container, "--json")
    facts = json.loads(done.out)
    assert (done.status, done.err) == (0, "")
    config = json.loads((container / "config.json").read_text())
    for name in ("model_type", "num_hidden_layers", "num_experts", "num_experts_per_tok", "vocab_size"):
        assert facts[name] == config[name]
    # 64-wide gate, up and down of 24 rows padded to 32, in float32, with padding to 4096
    record = 4 * (2 * 64 * 32 + 64 * 32)
    assert facts["record_bytes"] == record
    assert facts["expert_bytes"] == 2 * 8 * record
    assert facts["bytes_per_token_cycle"] == 2 * 2 * record
    assert facts["kv_bytes_per_token"] == {"f16": 2 * 2 * 64 * 2, "f32": 2 * 2 * 64 * 4}
    assert facts["dense_bytes"] <= (container / "dense.safetensors").stat().st_size
    assert facts["tokenizer"]["end_ids"] == [327]
    assert facts["tokenizer"]["vocab_size"] == 330


def test_lines_for_people_name_the_same_facts(coli, container):
    out = coli("info", container).out
    for part in ("olmoe, 2 layers", "2 layers x 8 records of 24.58 kB, 2 per token", "98.30 kB", "end ids 327"):
        assert part in out


def test_verbose_lists_the_tensors(coli, container):
    assert "lm_head.weight f32 330x64" in coli("info", container, "--verbose").out
    assert "lm_head.weight" not in coli("info", container).out
    assert "lm_head.weight" in json.loads(coli("info", container, "--json", "--verbose").out)["tensors"]


def test_model_may_come_from_flag_or_variable(coli, container, monkeypatch):
    expected = coli("info", container).out
    assert coli("info", "--model", container).out == expected
    monkeypatch.setenv("COLI_MODEL", str(container))
    assert coli("info").out == expected
    assert coli("info", container, "--model", container).status == 2


def test_unusable_tokenizer_is_told_and_the_rest_is_shown(coli, container):
    (container / "tokenizer.json").unlink()
    done = coli("info", container)
    assert done.status == 0
    assert "tokenizer    cannot be used: " in done.out


def test_what_is_no_container_is_status_2_with_the_line_to_type(coli, tmp_path):
    source = shutil.copytree(ORACLE / "olmoe-base", tmp_path / "my model")
    done = coli("info", source)
    assert (done.status, done.out) == (2, "")
    assert f"coli convert '{source}' '{source}-coli'" in done.err


@pytest.mark.parametrize("name", ["coli.json", "config.json"])
def test_damaged_container_is_one_line_and_status_1(coli, container, name):
    (container / name).write_text("{")
    done = coli("info", container)
    assert (done.status, done.out) == (1, "")
    assert done.err.count("\n") == 1
