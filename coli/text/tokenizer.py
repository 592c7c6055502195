"""Text <-> token ids of one model folder: a thin, checked layer over the `tokenizers` library.

Owns which ids are special, which end an answer and whether a BOS is added. Special tokens are recognized only where
the caller says that the text comes from a template: the same characters in a user's text stay ordinary text.
Knows nothing of the model; safe to call from any thread.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from coli.errors import TokenizerError
from coli.text.files import named_tokens, read_json_object, read_text
from coli.text.token_bytes import token_decoder

TOKENIZER_CAP = 256 * 2**20  # bytes; the largest in the wild are about 35 MB
MAX_TOKEN_ID = 2**24


class Tokenizer:
    """Encoder and id table; `end_ids` is the union of what all configuration files of the folder name."""

    def __init__(self, backend: tokenizers.Tokenizer, source: str, path: Path, configs: dict[str, dict[str, Any]]):
        self.path = path
        self._source = source  # text of tokenizer.json, for the twin that does not know the special tokens' names
        self._backend = backend
        added: dict[int, Any] = backend.get_added_tokens_decoder()
        self._added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self._special: dict[int, str] = {token_id: token.content for token_id, token in added.items() if token.special}
        decoder = backend.decoder
        self._decode: Callable[[str], bytes] = token_decoder(
            decoder.__getstate__() if decoder is not None else None, str(path)
        )
        self._bytes: dict[int, bytes] = {}
        settings = configs.get("tokenizer_config.json", {})
        self.special_tokens = named_tokens(settings, path.parent / "tokenizer_config.json")
        self.bos_id = self.id_of(self.special_tokens.get("bos_token"))
        self.prefix_ids = self._prefix_ids(settings)
        self.end_ids = self._end_ids(configs)
        # Longest first: of two special tokens that start at one place the library takes the longer one.
        names = sorted(filter(None, self._special.values()), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Open the tokenizer of a model folder. Raises TokenizerError naming file and field."""
        path = folder / "tokenizer.json"
        source = read_text(path, TOKENIZER_CAP)
        if source is None:
            hint = " (tokenizer.model alone is not enough)" if (folder / "tokenizer.model").exists() else ""
            raise TokenizerError(f"{path}: missing{hint}; get tokenizer.json from the model's page and convert again")
        names = ("config.json", "generation_config.json", "tokenizer_config.json")
        configs = {name: read_json_object(folder / name) or {} for name in names}
        return cls(_backend(source, path), source, path, configs)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens."""
        return frozenset(self._special)

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        highest = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if highest > MAX_TOKEN_ID:
            raise TokenizerError(f"{self.path}: token id {highest}: expected at most {MAX_TOKEN_ID}; download it again")
        return highest + 1

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what each id stands for: equal exactly when ids of one tokenizer mean the same in the other."""
        digest = hashlib.sha256()
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        for token, token_id in sorted(vocabulary.items(), key=lambda item: item[1]):
            digest.update(f"{token_id}\t{token}\n".encode("utf-8", "replace"))
        return digest.hexdigest()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id; empty for ids outside the vocabulary (models pad theirs)."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._look_up(token_id)
        return found

    def _look_up(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode("utf-8", "replace")
        entry = self._backend.id_to_token(token_id) if 0 <= token_id <= MAX_TOKEN_ID else None
        return b"" if entry is None else self._decode(entry)

    def decode(self, token_ids: list[int] | tuple[int, ...]) -> str:
        """Text of ids, special tokens included; what is not UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of `text`, nothing added. special: recognize special tokens (template text); otherwise they are text."""
        ids = self._encode(self._backend, text)
        if special or not self._shows_special(text, ids):
            return ids
        return self._encode(self._twin[0], text)

    def encode_marked(self, text: str, marks: dict[str, str]) -> list[int]:
        """Ids of template text in which user text hides the starts of special tokens behind marks.

        marks: private character -> the character it stands for. What is still readable as a special token is one,
        what a mark hides is ordinary text.
        """
        twin, names = self._twin
        text = self._special_pattern.sub(lambda match: names[match[0]], text)
        for mark, original in marks.items():
            text = text.replace(mark, original)
        return self._encode(twin, text)

    def has_special(self, text: str) -> bool:
        """Whether the library would find a special token in `text`."""
        return bool(text) and self._shows_special(text, self._encode(self._backend, text))

    def _shows_special(self, text: str, ids: list[int]) -> bool:
        # By id as well as by name: a normalizer can turn other spellings into one, some models' pieces contain them.
        return bool(self._special_pattern.search(text)) or not self._special.keys().isdisjoint(ids)

    @property
    def special_texts(self) -> tuple[str, ...]:
        """The special tokens' texts."""
        return tuple(filter(None, self._special.values()))

    def _encode(self, backend: tokenizers.Tokenizer, text: str) -> list[int]:
        # Lone surrogates (bytes of an argument that are not UTF-8) cannot enter the library.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        return self._ids(backend, clean, add_special_tokens=False)

    def _ids(self, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            reason = library_fault(error)
            raise TokenizerError(f"{self.path}: cannot encode this text ({reason}); download it again") from None
        return ids

    @functools.cached_property
    def _twin(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        """The same tokenizer with unguessable names for its special tokens, and real name -> that name.

        Everything else (segments, prefix spaces, strip flags, ids) is as before, so template text whose special
        tokens are renamed encodes to the same ids, and a user's text cannot spell one.
        """
        secret = secrets.token_hex(8)
        names = {text: f"\ufdd0{secret}{token_id:x}\ufdd1" for token_id, text in self._special.items() if text}
        twin = _backend(json.dumps(_renamed(json.loads(self._source), names)), self.path)
        for token_id, text in self._special.items():
            if text and twin.token_to_id(names[text]) != token_id:
                raise TokenizerError(f"{self.path}: added token {text!r} cannot be told from the same text of a user")
        return twin, names

    def id_of(self, text: str | None) -> int | None:
        """The id of the token spelled `text` in the vocabulary (an added token's text), None if there is none."""
        return None if text is None else self._backend.token_to_id(text)

    def _prefix_ids(self, settings: dict[str, Any]) -> tuple[int, ...]:
        """What is put before a plain prompt: add_bos_token where it is said, else what the post-processor adds."""
        add_bos = settings.get("add_bos_token")
        if isinstance(add_bos, bool):
            return (self.bos_id,) if add_bos and self.bos_id is not None else ()
        bare = self._ids(self._backend, "a", add_special_tokens=False)
        full = self._ids(self._backend, "a", add_special_tokens=True)
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return tuple(full[:start])
        return ()

    def _end_ids(self, configs: dict[str, dict[str, Any]]) -> frozenset[int]:
        ends: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            field = configs.get(name, {}).get("eos_token_id")
            listed = field if isinstance(field, list) else [] if field is None else [field]
            for token_id in listed:
                if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id <= MAX_TOKEN_ID:
                    place = self.path.parent / name
                    raise TokenizerError(f"{place}: eos_token_id: expected a token id or a list, found {token_id!r}")
                ends.add(token_id)
        named = self.id_of(self.special_tokens.get("eos_token"))
        return frozenset(ends if named is None else ends | {named})


def _backend(source: str, path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(source)
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.model, tokenizers.models.BPE):
            backend.model.dropout = None  # training's noise
    except BaseException as error:
        reason = library_fault(error)
        raise TokenizerError(f"{path}: not a usable tokenizer ({reason}); download it again") from None
    return backend


def library_fault(error: BaseException) -> str:
    """What the library says; it raises bare Exception, and PanicException, which is no Exception."""
    if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
        raise error
    return " ".join(str(error).split())[:200]


def _renamed(source: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """A parsed tokenizer.json with the special tokens' texts replaced (changed in place and returned)."""
    source["post_processor"] = None
    for token in source["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = source["model"]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [piece, score] pairs
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    else:
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    merges = model.get("merges")
    if merges:
        pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in merges)
        model["merges"] = [merge for merge, parts in pairs if names.keys().isdisjoint((*parts, "".join(parts)))]
    return source
