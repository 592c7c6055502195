"""A file of requests becomes a file of answers: rows side by side in union forwards, each with the bytes it has alone.

The engine's thread (coli.server.worker) computes; this thread checks rows, keeps a few more of them waiting than can
run, and appends each answer as it ends, so the order of the records is that of the endings. Called by the command line.
"""

from __future__ import annotations

import hashlib
import json
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from coli.builtin import GRAMMARS
from coli.errors import (
    ChatTemplateError,
    ColiError,
    ContextLengthError,
    GrammarError,
    NumericError,
    OptionError,
    TokenizerError,
)
from coli.llm import LLM
from coli.options import DraftOptions, GenerateOptions
from coli.report import StoreCounters
from coli.server import bodies
from coli.server.logprobs import TokenLogprob
from coli.server.prompts import chat_choice, completion_choice, conversation_ids, fault
from coli.server.requests import ChatRequest, CompletionRequest, Generating, RefusedFieldError
from coli.server.worker import Done, Event, Failed, Job, Piece, Worker
from coli.text.prompt import plain_ids
from coli.tools.batch_rows import (
    INTERNAL,
    OTHER_MODEL,
    Output,
    Row,
    RowError,
    answer_record,
    error_record,
    open_input,
    read_rows,
)

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_Body = TypeVar("_Body", bound=Generating)
_REFUSED = (OptionError, ContextLengthError, GrammarError, ChatTemplateError, TokenizerError)


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """`names` the model answers to; `context` positions of one row, `context_asked`: the user set it; `kv` its type."""

    names: tuple[str, ...]
    slots: int
    context: int
    context_asked: bool
    kv: str
    think: bool | None = None


@dataclass(slots=True)
class BatchReport:
    """What a batch did; `rows` of the input, of which `kept` were done by an earlier start."""

    rows: int = 0
    kept: int = 0
    answered: int = 0
    errors: int = 0  # in all, and of the rows kept
    errors_kept: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    forwards: int = 0  # shared by the rows that were running
    forward_rows: int = 0  # answers in them, summed
    seconds: float = 0.0
    store: StoreCounters = field(default_factory=StoreCounters)

    @property
    def done(self) -> int:
        """Rows that have a record."""
        return self.kept + self.answered + self.errors - self.errors_kept

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        tokens = self.generated_tokens
        return {
            "rows": self.rows,
            "rows_kept": self.kept,
            "rows_answered": self.answered,
            "rows_with_errors": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": tokens,
            "forwards": self.forwards,
            "tokens_per_forward": tokens / self.forwards if self.forwards else 0.0,
            "answers_per_forward": self.forward_rows / self.forwards if self.forwards else 0.0,
            "seconds": self.seconds,
            "tokens_per_s": tokens / self.seconds if self.seconds else 0.0,
            "expert_hit_rate": self.store.hit_rate(),
            "expert_bytes_read": self.store.bytes_read,
            "bytes_per_token": self.store.bytes_read / tokens if tokens else None,
        }


Watch = Callable[[BatchReport], None]  # hears the report so far


@dataclass(slots=True, eq=False)
class _Running:
    """A row whose answer is being made."""

    row: Row
    body: ChatRequest | CompletionRequest
    tool_names: set[str]
    logprobs: int | None
    text: list[str] = field(default_factory=list)
    entries: list[TokenLogprob] = field(default_factory=list)


def run_batch(
    llm: LLM,
    source: Path,
    target: Path,
    options: BatchOptions,
    defaults: GenerateOptions,
    drafts: DraftOptions,
    watch: Watch,
) -> BatchReport:
    """Answer the rows of `source` into `target`; rows that `target` answers already are left alone.

    Raises OptionError for files that cannot be meant, ReadError, WriteError, BrokenPipeError (target `-`).
    """
    if target.exists() and target.is_file() and source.exists() and target.samefile(source):
        raise OptionError(f"{target}: is the input too; choose another file for -o")
    identity = _identity(llm, options, defaults, drafts)
    with open_input(source) as file, Output(target) as output:
        ids = [row.record_id for row in read_rows(file, identity)]
        report = BatchReport(rows=len(ids))
        if foreign := len(output.done.keys() - set(ids)):
            raise OptionError(
                f"{target}: {foreign} of its {len(output.done)} records are of other rows, another model or other "
                "options: choose another file for -o, or remove it"
            )
        output.resume()
        report.kept = len(output.done)
        report.errors = report.errors_kept = sum(output.done.values())
        left = (row for row in read_rows(file, identity) if row.record_id not in output.done)
        if report.kept < report.rows:
            _Batch(llm, output, options, defaults, drafts, report, watch).run(left)
        output.sync()
    return report


def _identity(llm: LLM, options: BatchOptions, defaults: GenerateOptions, drafts: DraftOptions) -> str:
    """A hash of everything beside the row that an answer depends on."""
    facts = {
        "model": llm.container.fingerprint,
        "generation": asdict(defaults),
        "kv": options.kv,
        "context": options.context if options.context_asked else None,
        "think": options.think,
        "accept": drafts.accept,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


class _Batch:
    """One start of a batch."""

    def __init__(
        self,
        llm: LLM,
        output: Output,
        options: BatchOptions,
        defaults: GenerateOptions,
        drafts: DraftOptions,
        report: BatchReport,
        watch: Watch,
    ) -> None:
        self._llm, self._output, self._options = llm, output, options
        self._defaults, self._report, self._watch = defaults, report, watch
        self._worker = Worker(llm, drafts, context=options.context, slots=options.slots, queue=options.slots)
        self._events: queue.SimpleQueue[tuple[_Running, Event]] = queue.SimpleQueue()
        self._json_grammar = (GRAMMARS / "json.gbnf").read_text()
        self._started = 0.0

    def run(self, rows: Iterator[Row]) -> None:
        self._worker.start()
        self._started, before = time.perf_counter(), self._counters()
        running = 0
        try:
            for row in rows:
                while running >= 2 * self._options.slots:  # as many again wait, so that no slot is ever free
                    running -= self._hear()
                try:
                    self._submit(row)
                    running += 1
                except RowError as error:
                    self._record(error_record(row, error), failed=True)
            while running:
                running -= self._hear()
        finally:
            self._worker.stop()
            self._report.store = self._counters().since(before)
            self._note()

    def _counters(self) -> StoreCounters:
        return self._llm.load(self._options.context).store_counters()

    def _submit(self, row: Row) -> None:
        """Check the row and hand it to the engine. Raises RowError."""
        if row.fault is not None:
            raise row.fault
        try:
            running, ids, grammar, answer = self._prepared(row)
            self._check_length(len(ids), answer.max_tokens)
        except RefusedFieldError as error:
            raise RowError(f"{error.field}: {error}", field=error.field) from None
        except ContextLengthError as error:
            raise RowError(str(error), "context_length_exceeded") from None
        except _REFUSED as error:
            raise RowError(str(error)) from None
        events = self._events
        deliver: Callable[[Event], None] = lambda event: events.put((running, event))  # noqa: E731
        self._worker.submit(Job(ids, answer, deliver, grammar, running.logprobs))

    def _prepared(self, row: Row) -> tuple[_Running, list[int], Any, GenerateOptions]:
        llm = self._llm
        if row.url == CHAT:
            chat = self._checked(row, ChatRequest)
            tools = chat.template_tools()
            names = {tool["function"]["name"] for tool in tools or []}
            running = _Running(row, chat, names, chat.wanted_logprobs)
            ids = conversation_ids(llm, chat, tools, self._options.think)
            body: Generating = chat
        elif row.url == COMPLETION:
            completion = self._checked(row, CompletionRequest)
            prompt = completion.one_prompt()
            running = _Running(row, completion, set(), completion.logprobs)
            ids = plain_ids(llm.tokenizer, prompt) if isinstance(prompt, str) else prompt
            body = completion
        else:
            raise RowError(f"url: expected {CHAT} or {COMPLETION}", field="url")
        llm.check_ids(ids)
        return running, ids, body.draft_grammar(self._json_grammar), body.options(self._defaults)

    def _checked(self, row: Row, kind: type[_Body]) -> _Body:
        try:
            body = kind.model_validate(row.body)
        except ValidationError as error:
            name, message, code = fault(error)
            raise RowError(message, code or "invalid_request", name) from None
        if body.stream:
            raise RowError("stream: a batch has none; leave it out", field="stream")
        if body.model is not None and body.model not in self._options.names:
            raise RowError(f"model: expected {self._options.names[0]} or nothing", OTHER_MODEL, "model")
        return body

    def _check_length(self, prompt: int, most: int) -> None:
        """What would end for want of room here and not in a run of its own is refused."""
        wanted, context = min(prompt + most, self._llm.spec.max_position_embeddings), self._options.context
        if prompt < 1:
            raise ContextLengthError("the prompt has no tokens; give some text")
        if prompt >= context:
            remedy = "raise --ctx" if prompt < self._llm.spec.max_position_embeddings else "shorten it"
            raise ContextLengthError(f"the prompt has {prompt} tokens, the context is {context}: {remedy}")
        if wanted > context and not self._options.context_asked:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and the answer up to {most}, the context is {context}: "
                f"give --ctx {wanted} or a smaller max_tokens"
            )

    def _hear(self) -> int:
        """Take one event; 1 if it ended a row."""
        running, event = self._events.get()
        if isinstance(event, Piece):
            running.text.append(event.text)
            running.entries += event.logprobs
            return 0
        if isinstance(event, Failed):
            self._record(error_record(running.row, _row_error(event.error)), failed=True)
        else:
            self._report.prompt_tokens += event.prompt_tokens
            self._report.generated_tokens += len(event.token_ids)
            self._record(answer_record(running.row, self._body(running, event)), failed=False)
        return 1

    def _body(self, running: _Running, done: Done) -> dict[str, Any]:
        """The body of the answer, as the server would send it."""
        row, body, text = running.row, running.body, "".join(running.text)
        token_bytes = self._llm.tokenizer.token_bytes
        if isinstance(body, ChatRequest):
            answer_id, kind = f"chatcmpl-{row.record_id[-24:]}", "chat.completion"
            choice = chat_choice(
                text, running.tool_names, answer_id, token_bytes, running.logprobs, running.entries, done
            )
        else:
            answer_id, kind = f"cmpl-{row.record_id[-24:]}", "text_completion"
            choice = completion_choice(text, token_bytes, running.logprobs, running.entries, done)
        return {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": self._options.names[0],
            "system_fingerprint": self._llm.container.fingerprint[:16],
            "choices": [choice],
            **bodies.ending(done),
        }

    def _record(self, record: dict[str, Any], failed: bool) -> None:
        self._output.append(record)
        self._report.errors += failed
        self._report.answered += not failed
        self._note()

    def _note(self) -> None:
        report, counts = self._report, self._worker.counts
        report.forwards, report.forward_rows = counts.steps, counts.step_rows
        report.seconds = time.perf_counter() - self._started
        self._watch(report)


def _row_error(error: Exception) -> RowError:
    """What a row is told that failed while it ran; anything that is not its own fault ends the batch."""
    if isinstance(error, ContextLengthError):
        return RowError(str(error), "context_length_exceeded")
    if isinstance(error, NumericError):
        return RowError(str(error), "numeric_error")
    if isinstance(error, _REFUSED):
        return RowError(str(error))
    if isinstance(error, ColiError):
        raise error
    return RowError(f"internal error: {type(error).__name__}", INTERNAL)
