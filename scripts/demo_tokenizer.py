"""Tokenizer and chat template of the demo model.

Byte-level BPE of VOCAB_SIZE entries, made so that a word copied from text into JSON keeps its tokens: a space is its
own token, a plural s is split off, digits and JSON punctuation are single. Only punctuation followed by a space and
the commonest little words (LITTLE) absorb one, to keep texts short. Called by train_demo.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 1024
END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL = (END, USER, ASSISTANT)
LITTLE = "a about and at by for from has in into is it no not of on or over the this to was with you".split()  # noqa: SIM905

PATTERN = "|".join(
    (
        r"[,;:.] ",
        r" - ",
        rf" (?:{'|'.join(LITTLE)})(?!\p{{L}})",
        r"\p{L}*[^\P{L}siu](?=s(?!\p{L}))",  # lamps -> lamp, s; not this, status, address
        r"\p{L}+",
        r"[^\p{L}]",
    )
)

# A system message opens the user's turn: <|user|>system text, newline, user text.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{{- '<|user|>' + message['content'] + '\n' }}"
    "{%- elif message['role'] == 'assistant' %}{{- '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{%- elif loop.index0 > 0 and messages[loop.index0 - 1]['role'] == 'system' %}{{- message['content'] }}"
    "{%- else %}{{- '<|user|>' + message['content'] }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer learnt from `texts`; deterministic for equal texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer_config(folder: Path) -> None:
    """tokenizer_config.json beside an existing tokenizer.json."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": END,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
