"""Small tokenizers for the tests: greedy longest match over random vocabularies, and a byte-level BPE trained here."""

import random
from collections.abc import Iterable, Sequence
from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from coli.text.token_bytes import BYTE_SYMBOLS


class GreedyTokenizer:
    """All single bytes, then `pieces`, then special tokens; encodes by the longest match."""

    def __init__(self, pieces: Iterable[bytes], special: Sequence[str] = ()) -> None:
        self._entries = [*(bytes([byte]) for byte in range(256)), *dict.fromkeys(pieces)]
        self.special_ids = frozenset(range(len(self._entries), len(self._entries) + len(special)))
        self._ids = {entry: token_id for token_id, entry in enumerate(self._entries)}
        self._entries += [text.encode() for text in special]
        self.vocab_size = len(self._entries)
        self._longest = max(map(len, self._entries))

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            length = next(
                size for size in range(self._longest, 0, -1) if data[:size] in self._ids and size <= len(data)
            )
            ids.append(self._ids[data[:length]])
            data = data[length:]
        return ids

    def id_of(self, piece: bytes) -> int:
        return self._entries.index(piece)

    def token_bytes(self, token_id: int) -> bytes:
        return self._entries[token_id] if 0 <= token_id < self.vocab_size else b""


class BpeTokenizer:
    """A byte-level BPE of the GPT-2 kind over the `tokenizers` library."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.vocab_size = backend.get_vocab_size()
        self.special_ids = frozenset({backend.token_to_id("<end>")})
        self._bytes = [self._spell(token_id) for token_id in range(self.vocab_size)]

    def _spell(self, token_id: int) -> bytes:
        entry = self._backend.id_to_token(token_id)
        return entry.encode() if token_id in self.special_ids else bytes(BYTE_SYMBOLS[char] for char in entry)

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


@cache
def bpe_tokenizer() -> BpeTokenizer:
    """Trained on order records and prose, 700 entries."""
    rng = random.Random(1)
    lines = [record(rng, number, *spacing) for number in range(300) for spacing in ((",", ":"), (", ", ": "))]
    lines += [
        "The order was shipped on Monday and paid by card.",
        "Leave it at the door, please.",
        "naïve café 😀",
    ] * 20
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(lines, trainer)
    return BpeTokenizer(backend)


NAMES = ("Ada Lovelace", "Grace Hopper", "Åsa Ek", "Niels Bohr", "Kurt Gödel", "Emmy Noether")
WORDS = (
    *("leave", "door", "call", "gift", "wrap", "fragile", "second", "attempt", "paid"),
    *("card", "number", "back", "until", "march", "refund", "signature"),
)


def record(rng: random.Random, number: int, comma: str = ",", colon: str = ":") -> str:
    """One order record as in grammars/ndjson-order.gbnf."""
    fields = {
        "id": str(1000 + number),
        "customer": f'"{rng.choice(NAMES)}"',
        "status": f'"{rng.choice(("open", "paid", "shipped", "cancelled"))}"',
        "priority": f'"{rng.choice(("low", "normal", "high"))}"',
        "total": f"{rng.randrange(50000) / 100}",
        "notes": '"' + " ".join(rng.choices(WORDS, k=rng.randrange(4))) + '"',
    }
    return "{" + comma.join(f'"{key}"{colon}{value}' for key, value in fields.items()) + "}"
