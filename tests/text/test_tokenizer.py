import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text import build

from coli.errors import TokenizerError
from coli.text.chat import ChatTemplate
from coli.text.prompt import chat_ids, plain_ids
from coli.text.tokenizer import Tokenizer

HERE = Path(__file__).parent
ORACLE = HERE.parent / "oracle"
KINDS = {
    "byte_level": build.byte_level,
    "sentencepiece": build.sentencepiece,
    "always": lambda: build.sentencepiece("always"),
    "legacy": lambda: build.sentencepiece(legacy=True),
    "unigram": build.unigram,
}


@pytest.fixture(params=KINDS)
def tokenizer(request, tmp_path) -> Tokenizer:
    return Tokenizer.load(build.folder(tmp_path, KINDS[request.param]()))


def test_reference_cases_encode_and_decode_exactly():
    tokenizer = Tokenizer.load(ORACLE / "olmoe-base")
    for case in json.loads((HERE / "tokenizer_cases.json").read_text()):
        assert tokenizer.encode(case["text"], special=True) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["decoded"]


@pytest.mark.real
@pytest.mark.skipif("SMOL_LLAMA" not in os.environ, reason="SMOL_LLAMA names no model folder")
def test_smollm2_prompts_and_text_equal_the_reference():
    tokenizer = Tokenizer.load(Path(os.environ["SMOL_LLAMA"]))
    template = ChatTemplate.load(tokenizer.path.parent)
    for case in json.loads((ORACLE / "smollm2-135m.json").read_text())["prompts"]:
        chat = [{"role": "user", "content": case["prompt"]}]
        ids = plain_ids(tokenizer, case["prompt"]) if case["kind"] == "raw" else chat_ids(tokenizer, template, chat)
        assert ids == case["prompt_ids"]
        assert tokenizer.decode(case["greedy_ids"]) == case["text"]
    assert tokenizer.end_ids == {0, 2}  # <|endoftext|> and <|im_end|>, as the folder made of the package's GGUF says


def test_bytes_of_ids_join_to_the_encoded_text(tmp_path):
    tokenizer = Tokenizer.load(build.folder(tmp_path, build.byte_level()))

    @settings(max_examples=60)
    @given(st.text())
    def check(text):
        data = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
        assert data == text.encode("utf-8", "replace")

    check()


def test_every_byte_has_a_symbol(tmp_path):
    tokenizer = Tokenizer.load(build.folder(tmp_path, build.byte_level()))
    singles = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= singles


@pytest.mark.parametrize("scheme", ["first", "never"])
def test_metaspace_bytes_are_spaces_and_byte_tokens_are_bytes(tmp_path, scheme):
    tokenizer = Tokenizer.load(build.folder(tmp_path, build.sentencepiece(scheme)))
    ids = tokenizer.encode("the river é 日")
    data = b"".join(map(tokenizer.token_bytes, ids))
    assert data.decode() == (" the river é 日" if scheme == "first" else "the river é 日")


def test_added_tokens_are_their_own_text_even_with_byte_symbols_in_them(tmp_path):
    tokenizer = Tokenizer.load(build.folder(tmp_path, build.byte_level(["<|é▁Ġ|>", "<s>", "</s>"])))
    (token_id,) = tokenizer.encode("<|é▁Ġ|>", special=True)
    assert tokenizer.token_bytes(token_id).decode() == "<|é▁Ġ|>"


def test_ids_beyond_the_vocabulary_have_no_bytes(tokenizer):
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.token_bytes(10**12) == b""


@pytest.mark.parametrize("text", ["</s>", "a</s> the<|user|>x", "<s><s>", "x<|end|>", "</s></s>the"])
def test_special_tokens_in_user_text_stay_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.special_ids.isdisjoint(i for i in ids if tokenizer.token_bytes(i) != b"<unk>")
    assert tokenizer.encode(text, special=True) != ids


def test_user_text_without_special_tokens_encodes_as_usual(tokenizer):
    for text in ("the river", " the  river<", "é日 <|use", ""):
        assert tokenizer.encode(text) == tokenizer.encode(text, special=True)


def test_text_that_is_no_unicode_does_not_crash(tokenizer):
    assert tokenizer.encode("a\udcffb") == tokenizer.encode("a?b")


def test_plain_prompt_gets_one_bos_when_the_post_processor_adds_it(tmp_path):
    tokenizer = Tokenizer.load(build.folder(tmp_path, build.sentencepiece()))
    ids = plain_ids(tokenizer, "the river")
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1


@pytest.mark.parametrize(("add_bos", "expected"), [(True, 1), (False, 0)])
def test_add_bos_token_beats_the_post_processor(tmp_path, add_bos, expected):
    spm = Tokenizer.load(build.folder(tmp_path / "a", build.sentencepiece(), {"add_bos_token": add_bos}))
    bpe = Tokenizer.load(build.folder(tmp_path / "b", build.byte_level(), {"add_bos_token": add_bos}))
    for tokenizer in (spm, bpe):
        assert plain_ids(tokenizer, "the").count(tokenizer.bos_id) == expected


def test_end_ids_are_the_union_of_all_config_files(tmp_path):
    files = {"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [8, 9]}}
    tokenizer = Tokenizer.load(build.folder(tmp_path, build.byte_level(), **files))
    (named,) = tokenizer.encode("</s>", special=True)
    assert tokenizer.end_ids == {7, 8, 9, named}


def test_end_ids_may_be_null_or_absent(tmp_path):
    settings = {"eos_token": {"content": "<|end|>", "lstrip": False}}
    files = {"config": {"eos_token_id": None}}
    tokenizer = Tokenizer.load(build.folder(tmp_path, build.byte_level(), settings, **files))
    assert tokenizer.end_ids == set(tokenizer.encode("<|end|>", special=True))


@pytest.mark.parametrize("bad", ["2", True, -1, [1, "x"], 1.5, {"a": 1}])
def test_end_id_of_wrong_type_is_named(tmp_path, bad):
    build.folder(tmp_path, build.byte_level(), generation_config={"eos_token_id": bad})
    with pytest.raises(TokenizerError, match=r"generation_config\.json: eos_token_id"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", "{}", '{"model": 3}', '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'],
)
def test_unusable_tokenizer_file_is_one_typed_line(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_truncated_tokenizer_file_is_one_typed_line(tmp_path):
    build.folder(tmp_path, build.byte_level())
    path = tmp_path / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a usable tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b'{"a": \xff}'])
def test_tokenizer_file_that_is_no_text_is_refused(tmp_path, data):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(TokenizerError, match="not UTF-8"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("start", "found"),
    [("version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer"), ("<!DOCTYPE html>", "a web page")],
)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_what_a_download_left_instead_of_the_file_is_recognised(tmp_path, name, start, found):
    build.folder(tmp_path, build.byte_level())
    (tmp_path / name).write_text(start)
    with pytest.raises(TokenizerError, match=f"{name}: {found}"):
        Tokenizer.load(tmp_path)


def test_missing_tokenizer_names_the_file_and_sentencepiece_model(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(TokenizerError, match=r"tokenizer\.model alone"):
        Tokenizer.load(tmp_path)


def test_oversized_file_is_refused_before_it_is_parsed(tmp_path, monkeypatch):
    build.folder(tmp_path, build.byte_level())
    monkeypatch.setattr("coli.text.tokenizer.TOKENIZER_CAP", 1000)
    with pytest.raises(TokenizerError, match="larger than 1000 bytes"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("field", [{"eos_token": 5}, {"bos_token": ["<s>"]}, {"bos_token": {"content": 1}}])
def test_named_token_of_wrong_type_is_named(tmp_path, field):
    build.folder(tmp_path, build.byte_level(), field)
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json: {next(iter(field))}"):
        Tokenizer.load(tmp_path)


def test_half_a_surrogate_pair_is_no_token(tmp_path):
    build.folder(tmp_path, build.byte_level(), {"bos_token": "\ud800"})
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: bos_token: expected Unicode text"):
        Tokenizer.load(tmp_path)


def edited(folder, **changes):
    """A folder whose tokenizer.json has `changes` in its model."""
    build.folder(folder, build.byte_level())
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"].update(changes)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_text_that_the_tokenizer_cannot_encode_is_one_typed_line(tmp_path):
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    tokenizer = Tokenizer.load(edited(tmp_path, **model))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot encode this text \(WordLevel error"):
        tokenizer.encode("river")


def test_absurd_ids_are_refused_where_all_ids_are_gone_through(tmp_path):
    content = json.loads((build.folder(tmp_path / "plain", build.byte_level()) / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"] | {"zzz": 4_000_000_000}
    tokenizer = Tokenizer.load(edited(tmp_path / "edited", vocab=vocab))
    with pytest.raises(TokenizerError, match="token id 4000000000: expected at most 16777216"):
        _ = tokenizer.vocab_size


def test_dropout_of_the_training_is_not_applied(tmp_path):
    usual = Tokenizer.load(build.folder(tmp_path / "plain", build.byte_level()))
    noisy = Tokenizer.load(edited(tmp_path / "edited", dropout=1.0))
    text = "the quick brown fox jumps"
    assert noisy.encode(text) == usual.encode(text)


def test_a_decoder_that_strips_absurdly_often_ends(tmp_path):
    tokenizer = build.byte_level()
    tokenizer.decoder = build.decoders.Strip("a", 10**12, 10**12)
    loaded = Tokenizer.load(build.folder(tmp_path, tokenizer))
    assert loaded.token_bytes(loaded.encode("a")[0]) == b""


def test_unknown_decoder_is_refused_by_name(tmp_path):
    tokenizer = build.byte_level()
    tokenizer.decoder = build.decoders.WordPiece()
    with pytest.raises(TokenizerError, match="'WordPiece' is not supported"):
        Tokenizer.load(build.folder(tmp_path, tokenizer))


def test_deeply_nested_config_is_refused(tmp_path):
    build.folder(tmp_path, build.byte_level())
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(TokenizerError, match=r"config\.json"):
        Tokenizer.load(tmp_path)


def test_fingerprint_depends_on_what_ids_mean_and_not_on_the_file(tmp_path):
    first = Tokenizer.load(build.folder(tmp_path / "a", build.byte_level()))
    again = Tokenizer.load(build.folder(tmp_path / "b", build.byte_level(), {"chat_template": "x"}))
    other = Tokenizer.load(build.folder(tmp_path / "c", build.byte_level(["<s>", "</s>"])))
    path = tmp_path / "b" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=3))
    assert first.fingerprint == again.fingerprint == Tokenizer.load(tmp_path / "b").fingerprint
    assert first.fingerprint != other.fingerprint


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path):
    backend = build.byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.load(build.folder(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("the quick brown fox")) == "the quick brown fox"
