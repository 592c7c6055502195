import shutil
from pathlib import Path

import pytest

ORACLE = Path(__file__).parent.parent / "oracle"


@pytest.fixture
def source(tmp_path) -> Path:
    return Path(shutil.copytree(ORACLE / "olmoe-base", tmp_path / "source"))


def test_folder_becomes_a_container_that_info_opens(coli, source, tmp_path):
    done = coli("convert", source, tmp_path / "out", "--quant", "f32")
    assert (done.status, done.out) == (0, "")
    assert done.err.startswith(f"{tmp_path / 'out'}: ")
    assert coli("info", tmp_path / "out").status == 0


def test_quiet_conversion_says_nothing(coli, source, tmp_path):
    done = coli("convert", source, tmp_path / "out", "--quant", "f32", "--quiet")
    assert (done.status, done.out, done.err) == (0, "", "")


def test_experts_and_dense_reach_the_converter(coli, source, tmp_path):
    assert coli("convert", source, tmp_path / "out", "--quant", "f32", "--experts", "q8").status == 0
    assert "dense f32, experts q8" in coli("info", tmp_path / "out").out


@pytest.mark.parametrize("args", [["--quant", "q5"], ["--experts", ""], ["--threads", "0"]])
def test_bad_settings_are_status_2_and_leave_nothing(coli, source, tmp_path, args):
    done = coli("convert", source, tmp_path / "out", *args)
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", '{"model": '),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
        ("tokenizer_config.json", '{"eos_token": 3}'),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("config.json", "{"),
        ("config.json", "[]"),
    ],
)
def test_text_files_that_cannot_be_used_are_one_line_and_leave_nothing(coli, source, tmp_path, name, content):
    (source / name).write_text(content)
    done = coli("convert", source, tmp_path / "out")
    assert done.status == 1
    assert done.err.count("\n") == 1
    assert str(source / name) in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_missing_tokenizer_is_noticed(coli, source, tmp_path):
    (source / "tokenizer.json").unlink()
    done = coli("convert", source, tmp_path / "out", "--quant", "f32")
    assert done.status == 0
    assert "no tokenizer.json" in done.err


def test_destination_in_use_is_refused(coli, source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    done = coli("convert", source, tmp_path / "out")
    assert done.status == 2
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_missing_source_is_one_line(coli, tmp_path):
    done = coli("convert", tmp_path / "nothing", tmp_path / "out")
    assert done.status in (1, 2)
    assert done.err.count("\n") == 1
