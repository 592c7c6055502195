"""A conversation that goes on: its messages, the session whose rows are kept from turn to turn, and the file of both.

A saved conversation reopens warm and answers with the bytes it would have given had it never stopped. Knows no
terminal; used by `coli chat`, one thread.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from coli.engine.session import Session
from coli.errors import CheckpointError, OptionError, WriteError
from coli.generation import GenerationResult, draw_seed
from coli.llm import LLM
from coli.model.kv_cache import KVCache
from coli.options import DraftOptions, GenerateOptions
from coli.store.safetensors_file import read_header
from coli.text.prompt import chat_ids, plain_ids

FORMAT = "coli session 1"


class Conversation:
    """Messages and rows of one conversation with an open model."""

    def __init__(self, llm: LLM, context: int, drafts: DraftOptions, think: bool | None = None) -> None:
        self._llm, self._drafts, self._think = llm, drafts, think
        self.context = context
        self.messages: list[dict[str, str]] = []
        self.system: str | None = None
        self.result: GenerationResult | None = None
        self._session: Session | None = None

    def reset(self) -> None:
        """Forget what was said; the system message stays."""
        self.messages = []

    def ask(self, text: str, options: GenerateOptions) -> Iterator[str]:
        """Say `text` and stream the answer. However the iteration ends, what was shown is part of the conversation."""
        self.messages.append({"role": "user", "content": text})
        return self._answer(options)

    def retry(self, options: GenerateOptions) -> Iterator[str]:
        """Answer the last message again, with another seed. Raises OptionError when there is none."""
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise OptionError("/retry: nothing was said yet")
        return self._answer(replace(options, sampler=replace(options.sampler, seed=draw_seed())))

    def _answer(self, options: GenerateOptions) -> Iterator[str]:
        if self._session is None:
            self._session = self._llm.new_session(self.context, drafts=self._drafts)
        said = {"role": "assistant", "content": ""}
        try:
            generation = self._llm.generate(self._ids(), options, self._drafts, self._session)
            pieces = iter(generation)
            self.messages.append(said)
            for piece in pieces:
                said["content"] += piece
                yield piece
            self.result = generation.result
        except Exception:
            asked = max(at for at, message in enumerate(self.messages) if message["role"] == "user")
            del self.messages[asked:]  # a question that could not be answered is not part of it
            raise

    def _ids(self) -> list[int]:
        template, tokenizer = self._llm.chat_template, self._llm.tokenizer
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, *self.messages]
        if template is None:
            return plain_ids(tokenizer, "\n".join(message["content"] for message in messages))
        return chat_ids(tokenizer, template, messages, enable_thinking=self._think)

    def save(self, path: Path) -> None:
        """Write messages and rows to `path`, whole or not at all. Raises WriteError."""
        session = self._session or self._llm.new_session(self.context, drafts=self._drafts)
        self._session, cache = session, session.cache
        assert isinstance(cache, KVCache)
        length = min(cache.length, len(session.token_ids))
        arrays = {"token_ids": np.array(session.token_ids[:length], np.int64), **cache.saved(length)}
        said = {"messages": self.messages, "system": self.system}
        metadata = {"format": FORMAT, "model": self._llm.container.fingerprint, "conversation": json.dumps(said)}
        name = ""
        try:
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
            os.close(handle)
            save_file(arrays, name, metadata)
            os.replace(name, path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                os.unlink(name)
            raise WriteError(f"{path}: the session is not written: {error}") from None

    def load(self, path: Path) -> None:
        """Go on with a saved conversation. Raises CheckpointError, OptionError for one of another model."""
        header = read_header(path)
        found = {name: (info.dtype, tuple(info.shape)) for name, info in header.tensors.items()}
        session = self._llm.new_session(self.context, drafts=self._drafts)
        cache = session.cache
        assert isinstance(cache, KVCache)
        with _opened(path) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CheckpointError(f"{path}: expected a file of `{FORMAT}`, found another")
            if metadata.get("model") != self._llm.container.fingerprint:
                raise OptionError(f"{path}: the session belongs to another model; name another file or that model")
            length = found.get("token_ids", ("", (0,)))[1][0]
            if length > cache.capacity:
                raise OptionError(f"{path}: the session has {length} positions, --ctx is {self.context}: raise --ctx")
            wanted = {"token_ids": ("I64", (length,))}
            for name, array in cache.saved(length).items():
                wanted[name] = {"uint16": "U16", "float32": "F32", "int64": "I64"}[array.dtype.name], array.shape
            if found != wanted:
                raise OptionError(f"{path}: the session's rows do not fit: expected {wanted}, found {found}")
            said = json.loads(metadata.get("conversation", "{}"))
            session.token_ids = [int(token_id) for token_id in file.get_tensor("token_ids")]
            cache.restore({name: file.get_tensor(name) for name in wanted if name != "token_ids"}, length)
        self._llm.check_ids(session.token_ids)
        self._session = session
        self.messages, self.system = list(said.get("messages", [])), said.get("system")


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a readable session ({error})") from None
