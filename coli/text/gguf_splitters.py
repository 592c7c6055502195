"""How the tokenizers behind each `tokenizer.ggml.pre` name cut text before byte-level BPE.

A table and not a rule: each entry is what the tokenizer.json of the models behind the name says, in the words of the
`tokenizers` library. Names that are missing here are not known well enough to give the models' own ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Component = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Splitter:
    """How text is cut before byte-level BPE: what the tokenizer.json of the models behind a `pre` name says."""

    parts: tuple[Component, ...]
    normalizer: str | None = None
    ignore_merges: bool = False  # a piece that is a token as a whole is never merged up
    add_bos: bool = False  # where the metadata does not say


def _split(pattern: str) -> Component:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _byte_level(use_regex: bool) -> Component:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _letters(ranges: str) -> str:
    """The inside of a character class, from code points and ranges of them in hexadecimal."""
    parts = (part.split("-") for part in ranges.split())
    return "".join("-".join(chr(int(code, 16)) for code in part) for part in parts)


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGITS: Component = {"type": "Digits", "individual_digits": True}
_GPT2 = (_byte_level(use_regex=True),)
_GPT2_DIGITS = (_DIGITS, *_GPT2)


def _words(digits: str) -> tuple[Component, ...]:
    """Llama 3's and Qwen's pattern; they differ in how many digits stay together."""
    words = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    return _split(f"{_CONTRACTIONS}|{words}|{_TAIL}"), _byte_level(use_regex=False)


_QWEN35 = (
    _split(
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
        rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
    ),
    _byte_level(use_regex=False),
)
_FALCON: tuple[Component, ...] = (
    {"type": "Punctuation", "behavior": "Contiguous"},
    *_GPT2,
    {"type": "Digits", "individual_digits": False},
    _split("[0-9][0-9][0-9]"),
)
_TEKKEN = (
    _split(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
        rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    ),
    _byte_level(use_regex=False),
)
_O200K = (
    _split(
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTIONS}?|"
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTIONS}?|"
        rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    ),
    _byte_level(use_regex=False),
)
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_V3 = (
    _split(r"\p{N}{1,3}"),
    _split(_HAN_KANA),
    _split(
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        rf" ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
    ),
    _byte_level(use_regex=False),
)
_DEEPSEEK_CODER = (
    _split(r"[\r\n]"),
    _split(r"\s?\p{L}+"),
    _split(r"\s?\p{P}+"),
    _split(_DEEPSEEK_HAN),
    _DIGITS,
    _byte_level(use_regex=False),
)
_CASED_LETTERS = _letters(
    """
    41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1
    3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a
    1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4
    1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128
    212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 a640-a66d
    a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f
    104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943
    """
)  # written out, as the tokenizer does: cased letters of an older Unicode
_DEEPSEEK_LLM = (
    _split(r"[\r\n]"),
    _split(rf"\s?[{_CASED_LETTERS}]+"),
    _split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    _split(r"\s+$"),
    _split(_DEEPSEEK_HAN),
    _DIGITS,
    _byte_level(use_regex=False),
)
_LLAMA3 = Splitter(_words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)

SPLITTERS: Mapping[str, Splitter] = {
    "command-r": Splitter(_GPT2_DIGITS, "NFC"),
    "deepseek-coder": Splitter(_DEEPSEEK_CODER),
    "deepseek-llm": Splitter(_DEEPSEEK_LLM),
    "deepseek-v3": Splitter(_DEEPSEEK_V3),
    "falcon": Splitter(_FALCON),
    "gpt-2": Splitter(_GPT2),
    "gpt-4o": Splitter(_O200K, ignore_merges=True),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "mpt": Splitter(_GPT2, "NFC"),
    "olmo": Splitter(_GPT2, "NFC"),
    "qwen2": Splitter(_words(r"\p{N}"), "NFC"),
    "qwen35": Splitter(_QWEN35),
    "refact": Splitter(_GPT2_DIGITS),
    "smollm": Splitter(_GPT2_DIGITS),
    "starcoder": Splitter(_GPT2_DIGITS),
    "tekken": Splitter(_TEKKEN, ignore_merges=True, add_bos=True),
}
