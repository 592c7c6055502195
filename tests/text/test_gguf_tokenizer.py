"""A vocabulary from GGUF metadata gives the ids of the model's own tokenizer; what is not known exactly is refused.

`real` tests read llama.cpp's vocabulary files with their text/ids pairs from the folder GGUF_VOCABULARIES.
"""

import heapq
import json
import os
import random
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from coli.errors import ChatTemplateError, TokenizerError, UnsupportedModelError
from coli.text.chat import ChatTemplate
from coli.text.gguf_splitters import SPLITTERS
from coli.text.gguf_tokenizer import tokenizer_files
from coli.text.tokenizer import Tokenizer

TESTS = Path(__file__).parent.parent
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
REFERENCES = {
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3",
    "qwen2", "qwen35", "refact", "starcoder",
}  # fmt: skip


def byte_level(**changes: Any) -> dict[str, Any]:
    """Metadata of the oracle models' tokenizer."""
    tokenizer = json.loads((TESTS / "oracle" / "qwen3-base" / "tokenizer.json").read_text())
    texts = {token_id: text for text, token_id in tokenizer["model"]["vocab"].items()}
    texts |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    metadata = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": [texts[i] for i in range(len(texts))],
        "token_type": [CONTROL if i >= 327 else NORMAL for i in range(len(texts))],
        "merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "eos_token_id": 327,
    }
    return keyed(metadata | changes)


PIECES = {
    SPACE: -20, "t": -21, "h": -22, "e": -23, "a": -24, "n": -25, SPACE + "t": -1, "he": -2, SPACE + "the": -3,
    "an": -4, SPACE + "a": -5, SPACE + "an": -6, "th": -7, SPACE * 2: -97, SPACE * 3: -99, SPACE * 4: -98,
}  # fmt: skip


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary small enough to reason about."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256), *([NORMAL] * len(PIECES))],
        "scores": [*([0.0] * 259), *map(float, PIECES.values())],
    }
    return keyed(metadata | changes)


def keyed(metadata: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def load(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    for name, content in tokenizer_files(metadata, "m.gguf").items():
        (folder / name).write_bytes(content)
    return Tokenizer.load(folder)


def join_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule, slowly: join the adjacent pair with the best-scored piece, leftmost first."""
    parts: list[str] = list(SPACE + text.replace(" ", SPACE)) if text else []
    queue: list[tuple[float, int, int, str]] = []
    after = [*range(1, len(parts)), -1]
    before = list(range(-1, len(parts) - 1))

    def consider(left: int, right: int) -> None:
        if left >= 0 and right >= 0 and parts[left] + parts[right] in scores:
            joined = parts[left] + parts[right]
            heapq.heappush(queue, (-scores[joined], left, right, joined))

    for i in range(len(parts) - 1):
        consider(i, i + 1)
    while queue:
        _, left, right, joined = heapq.heappop(queue)
        if not parts[left] or not parts[right] or parts[left] + parts[right] != joined:
            continue
        parts[left], parts[right] = joined, ""
        after[left] = after[right]
        if after[right] >= 0:
            before[after[right]] = left
        consider(before[left], left)
        consider(left, after[left])
    return [part for part in parts if part]


def test_byte_level_ids_are_those_of_the_checkpoint(tmp_path: Path):
    tokenizer = load(byte_level(), tmp_path)
    for case in json.loads((TESTS / "text" / "tokenizer_cases.json").read_text()):
        if unicodedata.is_normalized("NFC", case["text"]):  # which the oracle's tokenizer, unlike Qwen's, does not do
            assert tokenizer.encode(case["text"], special=True) == case["ids"], case["text"]


@pytest.mark.parametrize(("name", "composes"), [("qwen2", True), ("olmo", True), ("smollm", False)])
def test_text_is_composed_where_the_models_do(name: str, composes: bool, tmp_path: Path):
    tokenizer = load(byte_level(pre=name), tmp_path)
    assert (tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")) is composes


def test_every_token_has_the_bytes_of_the_checkpoint(tmp_path: Path):
    ours = load(byte_level(), tmp_path)
    theirs = Tokenizer.load(TESTS / "oracle" / "qwen3-base")
    assert ours.fingerprint == theirs.fingerprint
    assert [ours.token_bytes(i) for i in range(331)] == [theirs.token_bytes(i) for i in range(331)]


def test_rows_that_pad_the_embedding_are_no_tokens(tmp_path: Path):
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] += ["[PAD330]", "[PAD331]", "[PAD7]"]
    metadata["tokenizer.ggml.token_type"] += [UNUSED, USER_DEFINED, USER_DEFINED]
    tokenizer = load(metadata, tmp_path)
    assert tokenizer.token_bytes(330) == tokenizer.token_bytes(331) == b""
    assert tokenizer.encode("[PAD7]") == [332]
    assert 331 not in tokenizer.encode("[PAD331]")


@pytest.mark.parametrize("name", SPLITTERS)
def test_every_splitter_loads_and_loses_no_byte(name: str, tmp_path: Path):
    tokenizer = load(byte_level(pre=name), tmp_path)
    text = "Don't  stop: 1234567 km²,\r\n\n\t日本語 ñandú 🙂! 'LL x²³  "
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_an_unknown_splitter_is_refused_by_name(tmp_path: Path):
    with pytest.raises(UnsupportedModelError, match=r"m\.gguf.*'viking'.*supported: .*qwen2"):
        tokenizer_files(byte_level(pre="viking"), "m.gguf")


def test_a_missing_splitter_is_not_guessed():
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer\.ggml\.pre"):
        tokenizer_files(byte_level(pre=None), "m.gguf")


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(UnsupportedModelError, match=r"'bert'"):
        tokenizer_files(byte_level(model="bert"), "m.gguf")


@pytest.mark.parametrize("model", [None, "none", "no_vocab"])
def test_a_file_without_vocabulary_gives_no_files(model: str | None):
    assert tokenizer_files(keyed({"model": model}), "m.gguf") == {}


def test_sentencepiece_joins_by_score(tmp_path: Path):
    tokenizer = load(sentencepiece(), tmp_path)
    rng = random.Random(3)
    ids = {piece: 259 + i for i, piece in enumerate(PIECES)}
    for _ in range(400):
        text = "".join(rng.choice("than  the") for _ in range(rng.randrange(1, 24)))
        assert tokenizer.encode(text) == [ids[piece] for piece in join_by_score(text, PIECES)], text


def test_sentencepiece_falls_back_to_bytes_and_back(tmp_path: Path):
    tokenizer = load(sentencepiece(), tmp_path)
    ids = tokenizer.encode("é\n")
    assert ids == [259, 3 + 0xC3, 3 + 0xA9, 3 + 0x0A]
    assert tokenizer.decode(ids) == " é\n"


def test_sentencepiece_defaults_are_bos_1_and_end_2(tmp_path: Path):
    tokenizer = load(sentencepiece(), tmp_path)
    assert tokenizer.prefix_ids == (1,)
    assert tokenizer.end_ids == {2}
    assert load(sentencepiece(add_bos_token=False), tmp_path).prefix_ids == ()


def test_sentencepiece_without_prefix_space(tmp_path: Path):
    tokenizer = load(sentencepiece(add_space_prefix=False), tmp_path)
    assert tokenizer.encode("the") != load(sentencepiece(), tmp_path).encode("the")
    assert tokenizer.decode(tokenizer.encode("the an")) == "the an"


def test_control_tokens_come_only_from_templates(tmp_path: Path):
    tokenizer = load(sentencepiece(), tmp_path)
    assert tokenizer.encode("</s>", special=True) == [2]
    assert 2 not in tokenizer.encode("</s>")


def test_user_defined_tokens_are_found_in_any_text(tmp_path: Path):
    metadata = byte_level()
    metadata["tokenizer.ggml.token_type"][328] = USER_DEFINED
    assert load(metadata, tmp_path).encode("<|user|>") == [328]


def test_scores_that_say_nothing_are_refused():
    with pytest.raises(TokenizerError, match=r"scores: most are equal"):
        tokenizer_files(sentencepiece(scores=[-1000.0] * (259 + len(PIECES))), "m.gguf")


def test_end_ids_are_the_union_of_keys_and_known_texts(tmp_path: Path):
    metadata = byte_level(eot_token_id=5, eom_token_id=6)
    metadata["tokenizer.ggml.tokens"] += ["<|im_end|>", "<|eot_id|>"]
    metadata["tokenizer.ggml.token_type"] += [CONTROL, NORMAL]
    assert load(metadata, tmp_path).end_ids == {327, 5, 6, 330}


def test_harmony_ends_a_message_with_another_token_than_an_answer(tmp_path: Path):
    """<|end|> stands between the analysis and the answer; in other models it ends."""
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] += ["<|return|>", "<|end|>", "<|call|>"]
    metadata["tokenizer.ggml.token_type"] += [CONTROL] * 3
    (tmp_path / "harmony").mkdir()
    assert load(metadata, tmp_path / "harmony").end_ids == {327, 330, 332}
    metadata["tokenizer.ggml.token_type"][332] = NORMAL
    assert load(metadata, tmp_path).end_ids == {327, 330, 331}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("HelloWorld don't", ["Hello", "World", " don't"]),
        ("ABCdef GHI'LL", ["ABCdef", " GHI'LL"]),
        ("1234567", ["123", "456", "7"]),
        ("a,/\n\nb  c", ["a", ",/\n\n", "b", " ", " c"]),
        ("  x \n y", [" ", " x", " \n", " y"]),
    ],
)
def test_the_splitter_of_gpt_oss_cuts_as_o200k(text: str, pieces: list[str]):
    source = {"type": "Sequence", "pretokenizers": list(SPLITTERS["gpt-4o"].parts)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE()).to_str()
    backend = tokenizers.Tokenizer.from_str(json.dumps(json.loads(backend) | {"pre_tokenizer": source}))
    cut = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:stop] for _, (start, stop) in cut] == pieces


@pytest.mark.real
def test_the_vocabulary_of_gpt_oss_gives_the_ids_of_o200k(tmp_path: Path):
    """Against the package bpe-openai, which carries o200k_base and its own way of splitting."""
    encoding = pytest.importorskip("bpe_openai").get_encoding("o200k_base")
    ranks: dict[bytes, int] = dict(encoding._mergeable_ranks)
    tokens = sorted(ranks, key=lambda token: ranks[token])
    assert [ranks[token] for token in tokens] == list(range(len(tokens)))
    merges = [" ".join(map(spelled, halves(token, ranks))) for token in tokens if len(token) > 1]
    metadata = {"model": "gpt2", "pre": "gpt-4o", "tokens": [spelled(token) for token in tokens], "merges": merges}
    tokenizer = load(keyed(metadata), tmp_path)
    rng = random.Random(1)
    letters = "aAbBzZéÉßñÑǅﬁ日本語한국어абвАБВאבג𝒜'’sStT \n\r\t0123456789½²٣.,;:!?/\\-_()[]{}<>|\u0301\u200d🙂👩"
    texts = ["".join(rng.choice(letters) for _ in range(rng.randint(1, 40))) for _ in range(20_000)]
    texts += [path.read_text() for path in sorted(TESTS.glob("**/*.py"))[:100]]
    assert [text for text in texts if tokenizer.encode(text) != list(encoding.encode_ordinary(text))] == []


def halves(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that a token was merged from: what merges of lower rank leave of it."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [(ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1)]
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def spelled(token: bytes) -> str:
    """As byte-level BPE writes bytes: printable ones as they are, the others from 256 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in plain]
    return "".join(chr(byte) if byte in plain else chr(256 + others.index(byte)) for byte in token)


def test_the_template_is_kept(tmp_path: Path):
    load(byte_level() | {"tokenizer.chat_template": "{{ messages[0].content }}!"}, tmp_path)
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "hi!"


def test_the_default_of_several_templates_is_used(tmp_path: Path):
    load(
        byte_level()
        | {
            "tokenizer.chat_template": "plain",
            "tokenizer.chat_templates": ["tool_use"],
            "tokenizer.chat_template.tool_use": "tools",
        },
        tmp_path,
    )
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render([]) == "plain"


def test_a_template_that_cannot_be_compiled_is_refused_before_converting():
    with pytest.raises(ChatTemplateError, match=r"m\.gguf: tokenizer\.chat_template: line 1"):
        tokenizer_files(byte_level() | {"tokenizer.chat_template": "{% if %}"}, "m.gguf")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokens": None}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"tokens": ["a", 1]}, "tokens"),
        ({"token_type": [1]}, "token_type: expected 330 entries, found 1"),
        ({"merges": None}, "merges"),
        ({"merges": ["nothing like"]}, "'nothing like' is made of parts that are no tokens"),
        ({"merges": ["x"]}, "'x'"),
        ({"eos_token_id": 330}, "eos_token_id: expected an id below 330, found 330"),
        ({"add_bos_token": 1}, "add_bos_token"),
        ({"merges": ["x" * 10_000]}, "xxx... is made of parts that are no tokens"),
        ({"tokens": ["a", "x" * 1_000_000]}, "token 1 has 1000000 characters, expected at most 4096"),
    ],
)
def test_a_damaged_vocabulary_is_one_line_that_names_the_key(changes: dict[str, Any], expected: str):
    with pytest.raises(TokenizerError) as caught:
        tokenizer_files(byte_level(**changes), "m.gguf")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"chat_templates": 5}, "tokenizer.chat_templates: expected a list of names, found 5"),
        ({"chat_templates": [1]}, "tokenizer.chat_templates: expected a list of names"),
        ({"chat_templates": ["a"], "chat_template.a": "{% if %}"}, "tokenizer.chat_template: line 1"),
        ({"chat_templates": ["a", "b"], "chat_template.a": "x", "chat_template.b": "y"}, "no template named default"),
        ({"chat_template": "{{ x }}" * 200_000}, "tokenizer.chat_template: longer than 1048576 characters"),
    ],
)
def test_templates_that_could_not_be_used_are_refused_before_converting(changes: dict[str, Any], expected: str):
    metadata = byte_level() | {f"tokenizer.{key}": value for key, value in changes.items()}
    with pytest.raises(TokenizerError, match=re.escape(f"m.gguf: {expected}" if expected[0] == "t" else expected)):
        tokenizer_files(metadata, "m.gguf")


def test_a_row_name_with_an_absurd_number_is_a_token():
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"][-1] = f"[PAD{'9' * 4000}]"
    assert "[PAD999" in tokenizer_files(metadata, "m.gguf")["tokenizer.json"].decode()


def test_two_ids_for_one_token_are_refused():
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"][7] = metadata["tokenizer.ggml.tokens"][6]
    with pytest.raises(TokenizerError, match="both token 6 and token 7"):
        tokenizer_files(metadata, "m.gguf")


@pytest.mark.real
@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_ids_equal_llama_cpp_s_reference_pairs(name: str, tmp_path: Path):
    from coli.convert.gguf_file import read_header

    folder = os.environ.get("GGUF_VOCABULARIES")
    if folder is None:
        pytest.skip("GGUF_VOCABULARIES does not name a folder with ggml-vocab-*.gguf")
    path = Path(folder) / f"ggml-vocab-{name}.gguf"
    tokenizer = load(dict(read_header(path).metadata), tmp_path)
    texts = path.with_suffix(".gguf.inp").read_text().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().splitlines()
    assert len(lines) > 40
    for text, line in zip(texts, lines, strict=False):
        assert tokenizer.encode(text) == [int(item) for item in line.split()], repr(text)


@pytest.mark.real
def test_runs_of_spaces_are_joined_as_sentencepiece_does(tmp_path: Path):
    from coli.convert.gguf_file import read_header

    folder = os.environ.get("GGUF_VOCABULARIES")
    if folder is None:
        pytest.skip("GGUF_VOCABULARIES does not name a folder with ggml-vocab-*.gguf")
    metadata = dict(read_header(Path(folder) / "ggml-vocab-llama-spm.gguf").metadata)
    tokenizer = load(metadata, tmp_path)
    pieces = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    ids = {piece: i for i, piece in enumerate(metadata["tokenizer.ggml.tokens"])}
    for count in range(1, 100):
        for text in (" " * count, "a" + " " * count + "b", " " * count + "the"):
            assert tokenizer.encode(text) == [ids[piece] for piece in join_by_score(text, pieces)]
