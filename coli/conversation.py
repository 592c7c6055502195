"""A conversation that goes on: its messages, the session whose rows are kept from turn to turn, and the file of both.

A saved conversation reopens warm and answers with the bytes it would have given had it never stopped. Knows no
terminal; used by `coli chat`, one thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from coli.engine.session import Session
from coli.errors import CheckpointError, OptionError
from coli.generation import GenerationResult, draw_seed
from coli.llm import LLM
from coli.options import DraftOptions, GenerateOptions
from coli.session_file import SessionFile
from coli.text.prompt import chat_ids, plain_ids


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
        self._session = self._session or self._llm.new_session(self.context, drafts=self._drafts)
        note = json.dumps({"messages": self.messages, "system": self.system})
        self.file(path).save([self._session], note)

    def load(self, path: Path) -> None:
        """Go on with a saved conversation. Raises CheckpointError, OptionError for one of another model."""
        new = lambda: self._llm.new_session(self.context, drafts=self._drafts)  # noqa: E731
        sessions, note = self.file(path).load(1, new)
        try:
            said = json.loads(note)
            messages, system = said["messages"], said["system"]
            fits = len(sessions) == 1 and all(_is_message(each) for each in messages)
            if not fits or not isinstance(system, str | None):
                raise ValueError(note)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise CheckpointError(
                f"{path}: expected the messages of a conversation: remove it, or name another file"
            ) from None
        self._llm.check_ids(sessions[0].token_ids)
        self._session, self.messages, self.system = sessions[0], messages, system

    def file(self, path: Path) -> SessionFile:
        """Where `save` writes."""
        return SessionFile(path, "coli chat", self._llm.container.fingerprint)


def _is_message(found: object) -> bool:
    return isinstance(found, dict) and found.keys() == {"role", "content"} and all(map(_is_text, found.values()))


def _is_text(found: object) -> bool:
    return isinstance(found, str)
