"""The tokenizer of a model folder together with how many ids the model has."""

from pathlib import Path

from coli.text.files import read_json_object
from coli.text.tokenizer import Tokenizer


def model_vocabulary(folder: Path) -> tuple[Tokenizer, int]:
    """(tokenizer, number of ids); some models pad their vocabulary. Raises TokenizerError."""
    tokenizer = Tokenizer.load(folder)
    config = read_json_object(folder / "config.json") or {}
    padded = config.get("vocab_size")
    return tokenizer, max(tokenizer.vocab_size, padded if type(padded) is int and padded < 1 << 21 else 0)
