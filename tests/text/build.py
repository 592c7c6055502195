"""Small tokenizer folders for tests: byte-level BPE, SentencePiece-like BPE and Unigram, made with `tokenizers`."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog", "the river is low and the mill stands still"] * 4
CHAT_SPECIALS = ["<s>", "</s>", "<|user|>", "<|user|>x", "<|end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def byte_level(specials: list[str] = CHAT_SPECIALS) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def sentencepiece(prepend_scheme: str = "first", legacy: bool = False) -> Tokenizer:
    """Llama-2 kind: bytes as <0xNN>, specials in the model's vocabulary, metaspace by pre-tokenizer or normalizer."""
    words = ["<unk>", *CHAT_SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "the", "▁ri", "ver"]
    words += [*sorted(set("thervi▁ abcdqufoxjm")), "th", "▁th", "ri", "ve", "er"]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "th"), ("r", "i"), ("▁", "ri"), ("v", "e"), ("ve", "r")]
    vocab.setdefault("▁the", len(vocab))
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ["<unk>", *CHAT_SPECIALS]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """A model whose own pieces contain the special tokens' texts."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("<|user|>", -0.5), ("<|end|>", -0.5)]
    pieces += [(char, -3.0) for char in "▁abcdefghijklmnopqrstuvwxyz<>/|"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text, _ in pieces[:5]])
    return tokenizer


def folder(path: Path, tokenizer: Tokenizer, settings: dict[str, Any] | None = None, **files: Any) -> Path:
    """Write a tokenizer folder; files: name without .json -> JSON-ready object."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    written = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE} | (settings or {})
    (path / "tokenizer_config.json").write_text(json.dumps(written))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path
