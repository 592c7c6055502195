"""The vocabulary in a GGUF file's metadata -> tokenizer.json, tokenizer_config.json and generation_config.json.

Two kinds: byte-level BPE ("gpt2"), whose way of splitting text is only given by a name (`tokenizer.ggml.pre`), and
SentencePiece BPE ("llama"), whose merges follow from the scores. A name or kind that is not known here is refused:
any other splitter would load, run and give wrong ids. Ids are those of the models' own tokenizers.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import tokenizers

from coli.errors import TokenizerError, UnsupportedModelError
from coli.text.chat import ChatTemplate, default_of
from coli.text.gguf_splitters import SPLITTERS, Component, Splitter
from coli.text.tokenizer import library_fault

_T = TypeVar("_T")

MAX_TOKENS = 1 << 22
MAX_TOKEN_LENGTH = 1 << 12  # characters; runs of spaces reach some hundreds
_SPACE = "\u2581"  # SentencePiece's visible space
_PADDING = re.compile(r"\[PAD(\d{1,9})\]")
# Texts of control tokens that end an answer, whether or not the metadata names their ids.
_ENDS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>",
     "<|end_of_turn|>", "<｜end▁of▁sentence｜>", "<|return|>", "<|call|>")
)  # fmt: skip
# Harmony (gpt-oss) ends answers with these, and with <|end|> only a message, behind which the answer goes on.
_HARMONY_ENDS, _HARMONY_MESSAGE_END = frozenset(("<|return|>", "<|call|>")), "<|end|>"


class TokenType(IntEnum):
    """What `tokenizer.ggml.token_type` says of a token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def tokenizer_files(metadata: Mapping[str, Any], place: object) -> dict[str, bytes]:
    """File name -> content of the tokenizer files of a model; empty if the metadata holds no vocabulary.

    `place` names the GGUF file in messages. Raises UnsupportedModelError for a tokenizer kind or `pre` name that is
    not known and TokenizerError for a damaged vocabulary.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return {}
    if kind == "gpt2":
        name = metadata.get("tokenizer.ggml.pre")
        splitter = SPLITTERS.get(name) if isinstance(name, str) else None
        if splitter is None:
            raise UnsupportedModelError(f"{place}: {_unknown_splitter(name)}; supported: {', '.join(SPLITTERS)}")
        vocabulary = _Vocabulary(metadata, place)
        tokenizer, add_bos = _byte_level_bpe(vocabulary, splitter), splitter.add_bos
    elif kind == "llama":
        vocabulary = _Vocabulary(metadata, place)
        tokenizer, add_bos = _sentencepiece_bpe(vocabulary), True
    else:
        raise UnsupportedModelError(
            f"{place}: tokenizer.ggml.model {str(kind)[:40]!r} is not supported; supported: gpt2, llama"
        )
    settings = _settings(vocabulary, vocabulary.flag("add_bos_token", add_bos))
    generation = _generation(vocabulary)
    files = {"tokenizer.json": tokenizer, "tokenizer_config.json": settings, "generation_config.json": generation}
    texts = {name: json.dumps(content, ensure_ascii=False) for name, content in files.items()}
    _try(texts["tokenizer.json"], place)
    return {name: text.encode("utf-8", "replace") for name, text in texts.items()}


def _try(text: str, place: object) -> None:
    """TokenizerError if the library does not take what was made, before a model is written around it."""
    try:
        tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        reason = library_fault(error)
        raise TokenizerError(f"{place}: not a usable vocabulary ({reason}); download the file again") from None


def _unknown_splitter(name: object) -> str:
    if name is None:
        return "no tokenizer.ggml.pre, so how text is split is not known (a file from before May 2024)"
    return f"tokenizer.ggml.pre {str(name)[:40]!r} is not supported"


class _Vocabulary:
    """Tokens, types and special ids of one file, checked."""

    def __init__(self, metadata: Mapping[str, Any], place: object) -> None:
        self._metadata = metadata
        self.place = place
        tokens = self.listed("tokens", str)
        if not 0 < len(tokens) <= MAX_TOKENS:
            raise self.error("tokens", f"expected 1..{MAX_TOKENS} tokens, found {len(tokens)}")
        longest = max(range(len(tokens)), key=lambda token_id: len(tokens[token_id]))
        if len(tokens[longest]) > MAX_TOKEN_LENGTH:
            fault = f"token {longest} has {len(tokens[longest])} characters, expected at most {MAX_TOKEN_LENGTH}"
            raise self.error("tokens", fault)
        # An empty token stands for nothing; llama.cpp gives it this name.
        self.tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
        self.types = self.listed("token_type", int) if self.has("token_type") else [TokenType.NORMAL] * len(tokens)
        if len(self.types) != len(tokens):
            raise self.error("token_type", f"expected {len(tokens)} entries, found {len(self.types)}")

    def has(self, key: str) -> bool:
        return f"tokenizer.ggml.{key}" in self._metadata

    def listed(self, key: str, kind: type[_T]) -> list[_T]:
        values = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise self.error(key, f"expected a list of {kind.__name__}, found {_shown(values)}")
        return values

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {_shown(value)}")
        return value

    def token_id(self, key: str, default: int | None = None) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise self.error(key, f"expected an id below {len(self.tokens)}, found {_shown(value)}")
        return value

    def template(self) -> Any:
        """chat_template of tokenizer_config.json: text, or a list when there are several."""
        default = self._metadata.get("tokenizer.chat_template")
        names = self._metadata.get("tokenizer.chat_templates", [])
        place = f"{self.place}: tokenizer.chat_template"
        if not isinstance(names, list) or any(not isinstance(name, str) for name in names):
            raise TokenizerError(f"{place}s: expected a list of names, found {_shown(names)}")
        others = {name: self._metadata.get(f"tokenizer.chat_template.{name}") for name in names}
        for template in (default, *others.values()):
            if template is not None and not isinstance(template, str):
                raise TokenizerError(f"{place}: expected text, found {_shown(template)}")
        field = default
        if any(text is not None for text in others.values()):
            named = {**({} if default is None else {"default": default}), **others}
            field = [{"name": name, "template": text} for name, text in named.items() if text is not None]
        if field is not None:
            ChatTemplate(default_of(field, place), place)  # raises what running it would
        return field

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """Token -> id, without the rows that only pad the embedding."""
        found: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            if self._pads(token_id, token):
                continue
            if token in found:
                raise self.error("tokens", f"{token!r} is both token {found[token]} and token {token_id}")
            found[token] = token_id
        return found

    def _pads(self, token_id: int, token: str) -> bool:
        if self.types[token_id] not in (TokenType.UNUSED, TokenType.USER_DEFINED):
            return False
        match = _PADDING.fullmatch(token)
        return match is not None and int(match[1]) == token_id

    def added_tokens(self) -> list[Component]:
        """Tokens that are cut out of the text before anything else; control tokens only from templates."""
        special = (TokenType.CONTROL, TokenType.UNKNOWN)
        return [
            {
                "id": token_id,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": self.types[token_id] in special,
            }
            for token, token_id in self.ids.items()
            if self.types[token_id] in (*special, TokenType.USER_DEFINED)
        ]

    def error(self, key: str, fault: str) -> TokenizerError:
        return TokenizerError(f"{self.place}: tokenizer.ggml.{key}: {fault}")


def _byte_level_bpe(vocabulary: _Vocabulary, splitter: Splitter) -> Component:
    ids = vocabulary.ids
    merges: list[tuple[str, str]] = []
    for merge in vocabulary.listed("merges", str):
        left, _, right = merge[1:].partition(" ")
        pair = merge[:1] + left, right
        if not all(part in ids for part in (*pair, "".join(pair))):
            raise vocabulary.error("merges", f"{_shown(merge)} is made of parts that are no tokens")
        merges.append(pair)
    parts = list(splitter.parts)
    return _tokenizer(
        vocabulary,
        normalizer=None if splitter.normalizer is None else {"type": splitter.normalizer},
        pre_tokenizer=parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        model={"ignore_merges": splitter.ignore_merges, "merges": merges},
    )


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> Component:
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary.ids]
    if missing:
        raise vocabulary.error("tokens", f"{len(missing)} of 256 byte tokens missing, first <0x{missing[0]:02X}>")
    unknown = vocabulary.token_id("unknown_token_id", 0)
    assert unknown is not None
    prefix = vocabulary.flag("add_space_prefix", True)
    spaces: Component = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend: Component = {"type": "Prepend", "prepend": _SPACE}
    decoders: list[Component] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return _tokenizer(
        vocabulary,
        normalizer={"type": "Sequence", "normalizers": [prepend, spaces]} if prefix else spaces,
        pre_tokenizer=None,
        decoder={"type": "Sequence", "decoders": decoders},
        model={
            "unk_token": vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "merges": _merges_by_score(vocabulary),
        },
    )


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Pairs of pieces whose concatenation is a piece, the best-scored result first, equal scores in order of ids.

    SentencePiece joins the adjacent pair with the best-scored result, so ranking pairs by that score is the same.
    Models score runs of spaces all alike; there too this order gives the same pieces.
    """
    scores = _numbers(vocabulary, "scores")
    ids = {token: i for token, i in vocabulary.ids.items() if vocabulary.types[i] == TokenType.NORMAL}
    found: list[tuple[float, int, int, int, str, str]] = []
    for token, token_id in ids.items():
        for i in range(1, len(token)):
            left, right = ids.get(token[:i]), ids.get(token[i:])
            if left is not None and right is not None:
                found.append((-scores[token_id], token_id, left, right, token[:i], token[i:]))
    found.sort()
    results = {entry[1] for entry in found}
    if len({scores[token_id] for token_id in results}) <= len(results) // 2:
        raise vocabulary.error("scores", "most are equal, so the order of merges is not known: convert the original")
    return [(left, right) for *_, left, right in found]


def _numbers(vocabulary: _Vocabulary, key: str) -> Sequence[float]:
    values = vocabulary.listed(key, float)
    if len(values) != len(vocabulary.tokens) or not all(map(math.isfinite, values)):
        raise vocabulary.error(key, f"expected {len(vocabulary.tokens)} numbers, found {_shown(values)}")
    return values


def _tokenizer(
    vocabulary: _Vocabulary,
    *,
    normalizer: Component | None,
    pre_tokenizer: Component | None,
    decoder: Component,
    model: Component,
) -> Component:
    bpe: Component = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary.ids,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": bpe | model,
    }


def _special_ids(vocabulary: _Vocabulary) -> dict[str, int]:
    """bos, eos, unk and pad where the metadata names them; a SentencePiece file may leave out its first three."""
    keys = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
    sentencepiece = vocabulary.has("scores") and vocabulary.ids.get("<0x00>") is not None
    defaults = {"unk": 0, "bos": 1, "eos": 2} if sentencepiece else {}
    found = {name: vocabulary.token_id(key, defaults.get(name)) for name, key in keys.items()}
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def _settings(vocabulary: _Vocabulary, add_bos: bool) -> Component:
    named = {f"{name}_token": vocabulary.tokens[token_id] for name, token_id in _special_ids(vocabulary).items()}
    template = vocabulary.template()
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos and "bos_token" in named,
        "add_eos_token": vocabulary.flag("add_eos_token", False),
        "clean_up_tokenization_spaces": False,
        **named,
        **({} if template is None else {"chat_template": template}),
    }


def _generation(vocabulary: _Vocabulary) -> Component:
    """End ids: those the metadata names, and control tokens that are known to end an answer."""
    special = _special_ids(vocabulary)
    named = (special.get("eos"), vocabulary.token_id("eot_token_id"), vocabulary.token_id("eom_token_id"))
    ends = {token_id for token_id in named if token_id is not None}
    known = {token: i for token, i in vocabulary.ids.items() if vocabulary.types[i] == TokenType.CONTROL}
    texts = _ENDS & known.keys()
    if texts >= _HARMONY_ENDS:
        texts -= {_HARMONY_MESSAGE_END}
    ends |= {known[token] for token in texts}
    ids = {f"{name}_token_id": special[name] for name in ("bos", "pad") if name in special}
    return {**ids, "eos_token_id": sorted(ends)}


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
