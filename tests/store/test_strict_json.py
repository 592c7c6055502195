from pathlib import Path

import pytest

from coli.errors import CheckpointError
from coli.store.strict_json import read_object


def refusal(tmp_path: Path, data: bytes, max_bytes: int = 1000) -> str:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as raised:
        read_object(path, max_bytes)
    text = str(raised.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    return text


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, {"b": null}]}')
    assert read_object(tmp_path / "a.json") == {"a": [1, {"b": None}]}


def test_size_is_capped_before_the_file_is_read(tmp_path: Path) -> None:
    assert "larger than 1000 bytes" in refusal(tmp_path, b"[" * 5000)


@pytest.mark.parametrize("text", [b'{"a": 1, "a": 2}', b'{"x": {"a": 1, "b": 0, "a": 1}}'])
def test_duplicate_keys_are_named(tmp_path: Path, text: bytes) -> None:
    assert "key 'a' appears twice" in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("data", "fragment"),
    [
        (b"", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b"[1, 2]", "expected a JSON object, found list"),
        (b"7", "expected a JSON object, found int"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not usable JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"\n  <html lang=en>", "a web page"),
    ],
)
def test_anything_else_is_refused_in_one_line(tmp_path: Path, data: bytes, fragment: str) -> None:
    assert fragment in refusal(tmp_path, data, 10**7)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing\.json: cannot be read"):
        read_object(tmp_path / "nothing.json")
