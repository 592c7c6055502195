"""The routes: requests checked and turned into jobs, events turned into answers or streams.

Runs on one event loop, never calls the model; what takes longer than a moment (templates, tokenizing, grammars) runs in
a thread of the pool. Built by `coli.server.run` and by tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import prometheus_client
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from coli import __version__
from coli.builtin import GRAMMARS
from coli.errors import OptionError
from coli.grammar.load import LoadedGrammar
from coli.llm import LLM
from coli.options import GenerateOptions
from coli.server import bodies, metrics, page, streams
from coli.server.failures import http_error
from coli.server.guard import App, Guard, HttpError, read_body
from coli.server.live import MAX_WATCHERS, EngineView, Probe
from coli.server.logprobs import TokenLogprob
from coli.server.prompts import chat_choice, completion_choice, conversation_ids, fault
from coli.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    Generating,
    TokenizeRequest,
)
from coli.server.worker import Done, Event, Failed, Job, Worker
from coli.text.prompt import plain_ids

Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits and names of one server."""

    model_name: str
    host: str = "127.0.0.1"
    api_key: str | None = None
    body_bytes: int = 8 * 2**20
    body_seconds: float = 30.0
    graph_name: str | None = None
    think: bool | None = None


class Api:
    """The endpoints over one worker."""

    def __init__(
        self,
        llm: LLM,
        worker: Worker,
        options: ServerOptions,
        defaults: GenerateOptions,
        probe: Probe | None = None,
    ) -> None:
        """probe: measures the disk for /engine; None leaves it unknown."""
        self._llm, self._worker, self._options, self._defaults = llm, worker, options, defaults
        self._json_grammar = (GRAMMARS / "json.gbnf").read_text()
        self._started = int(time.time())
        self._registry = metrics.registry(worker)
        self.view = EngineView(llm, worker, options.model_name, probe)

    def app(self) -> App:
        endpoints: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("GET", "/health", self.health),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.model),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completion),
            ("POST", "/generate", self.generate),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
            ("GET", "/props", self.props),
            ("GET", "/metrics", self.metrics),
            ("GET", "/engine", self.engine),
            ("GET", "/engine/events", self.engine_events),
            *(("GET", path, page.file) for path in page.PATHS),
        ]
        routes = [Route(path, _answering(endpoint), methods=[method]) for method, path, endpoint in endpoints]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _not_found, Exception: _internal})
        return Guard(app, api_key=self._options.api_key, host=self._options.host, open_paths=page.PATHS)

    async def health(self, request: Request) -> Response:
        alive = self._worker.alive
        body = {
            "status": "ok" if alive else "stopping",
            "model_name": self._options.model_name,
            "model_loaded": alive,
            "graph_loaded": self._options.graph_name is not None,
            "graph_path": self._options.graph_name,
            "slots": self._worker.num_slots,
            "slots_free": self._worker.free_slots,
            "waiting": self._worker.waiting,
        }
        return JSONResponse(body, 200 if alive else 503)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_body()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["model"] != self._options.model_name:
            raise HttpError(404, f"model: expected {self._options.model_name}", "model", "model_not_found")
        return JSONResponse(self._model_body())

    def _model_body(self) -> dict[str, Any]:
        return {"id": self._options.model_name, "object": "model", "created": self._started, "owned_by": "coli"}

    async def props(self, request: Request) -> Response:
        spec, template = self._llm.spec, self._llm.chat_template
        sampler = self._defaults.sampler
        return JSONResponse(
            {
                "version": __version__,
                "model": self._options.model_name,
                "model_type": spec.model_type,
                "context": self._worker.context,
                "model_context": spec.max_position_embeddings,
                "vocab_size": spec.vocab_size,
                "total_slots": self._worker.num_slots,
                "fingerprint": self._llm.container.fingerprint,
                "session": None if (path := self._worker.slots.path) is None else str(path),
                "session_restored_tokens": self._worker.slots.restored_tokens,
                "chat_template": None if template is None else template.source,
                "default_generation_settings": {
                    "max_tokens": self._defaults.max_tokens,
                    "temperature": sampler.temperature,
                    "top_k": sampler.top_k,
                    "top_p": sampler.top_p,
                    "min_p": sampler.min_p,
                },
            }
        )

    async def metrics(self, request: Request) -> Response:
        return Response(
            prometheus_client.generate_latest(self._registry), media_type=prometheus_client.CONTENT_TYPE_LATEST
        )

    async def engine(self, request: Request) -> Response:
        return JSONResponse(self.view.state(), headers={"Cache-Control": "no-store"})

    async def engine_events(self, request: Request) -> Response:
        if self.view.watchers >= MAX_WATCHERS:
            raise HttpError(429, f"{MAX_WATCHERS} are watching already", retry_after=5)
        return streams.sse(self.view.events())

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeRequest)
        tokenizer = self._llm.tokenizer
        ids = await run_in_threadpool(tokenizer.encode, body.content, body.parse_special)
        return JSONResponse({"tokens": [*tokenizer.prefix_ids, *ids] if body.add_special else ids})

    async def detokenize(self, request: Request) -> Response:
        body = await self._read(request, DetokenizeRequest)
        self._check_ids(body.tokens, "tokens")
        return JSONResponse({"content": self._llm.tokenizer.decode(body.tokens)})

    async def generate(self, request: Request) -> Response:
        body = await self._read(request, GenerateRequest)
        names = ("temperature", "top_k", "top_p", "seed")
        given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
        options = replace(self._defaults, max_tokens=body.max_tokens, sampler=replace(self._defaults.sampler, **given))
        ids = await run_in_threadpool(self._llm.prompt_ids, body.prompt)
        text, _, done = await self._whole(request, *self._submit(ids, "prompt", options))
        judged = sum(counts["judged"] for counts in done.drafts.values())
        accepted = sum(counts["accepted"] for counts in done.drafts.values())
        return JSONResponse(
            {
                "text": text,
                "generated_tokens": len(done.token_ids),
                "prompt_tokens": done.prompt_tokens,
                "num_draft_tokens": judged,
                "num_accepted_tokens": accepted,
                "acceptance_rate": accepted / judged if judged else 0.0,
                "generation_time": round(done.seconds, 6),
                "finish_reason": done.finish_reason,
                **bodies.extras(done),
            }
        )

    async def chat(self, request: Request) -> Response:
        body = await self._read(request, ChatRequest)
        tools = body.template_tools()
        logprobs = body.wanted_logprobs
        options = body.options(self._defaults)
        think = self._options.think
        grammar, ids = await run_in_threadpool(
            lambda: (self._grammar(body), conversation_ids(self._llm, body, tools, think))
        )
        names = {tool["function"]["name"] for tool in tools or []}
        job, events = self._submit(ids, "messages", options, grammar, logprobs)
        answer_id = f"chatcmpl-{secrets.token_hex(12)}"
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            head, token_bytes = self._head(answer_id, "chat.completion.chunk"), self._llm.tokenizer.token_bytes
            told = streams.Extras(with_usage, body.stream_options is not None and body.stream_options.include_drafts)
            return streams.EventStream(streams.chat_stream(head, token_bytes, events, names, told), job)
        text, entries, done = await self._whole(request, job, events)
        token_bytes = self._llm.tokenizer.token_bytes
        choice = chat_choice(text, names, answer_id, token_bytes, logprobs, entries, done)
        return JSONResponse({**self._head(answer_id, "chat.completion"), "choices": [choice], **bodies.ending(done)})

    async def completion(self, request: Request) -> Response:
        body = await self._read(request, CompletionRequest)
        prompt = body.one_prompt()
        options = body.options(self._defaults)
        llm = self._llm

        def prepared() -> tuple[LoadedGrammar | None, list[int]]:
            ids = plain_ids(llm.tokenizer, prompt) if isinstance(prompt, str) else prompt
            return self._grammar(body), ids

        grammar, ids = await run_in_threadpool(prepared)
        job, events = self._submit(ids, "prompt", options, grammar, body.logprobs)
        answer_id = f"cmpl-{secrets.token_hex(12)}"
        if body.stream:
            with_usage = body.stream_options is not None and body.stream_options.include_usage
            head, token_bytes = self._head(answer_id, "text_completion"), llm.tokenizer.token_bytes
            return streams.EventStream(streams.completion_stream(head, token_bytes, events, with_usage), job)
        text, entries, done = await self._whole(request, job, events)
        token_bytes = llm.tokenizer.token_bytes
        choice = completion_choice(text, token_bytes, body.logprobs, entries, done)
        return JSONResponse({**self._head(answer_id, "text_completion"), "choices": [choice], **bodies.ending(done)})

    def _head(self, answer_id: str, kind: str) -> dict[str, Any]:
        return {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": self._options.model_name,
            "system_fingerprint": self._llm.container.fingerprint[:16],
        }

    def _grammar(self, body: Generating) -> LoadedGrammar | None:
        return body.draft_grammar(self._json_grammar)

    async def _read(self, request: Request, kind: type[Body]) -> Body:
        data = await read_body(request, self._options.body_bytes, self._options.body_seconds)
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            field, message, code = fault(error)
            raise HttpError(400, message, field, code) from None

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        try:
            self._llm.check_ids(ids)
        except OptionError as error:
            raise HttpError(400, f"{field}: {error}", field) from None

    def _submit(
        self,
        ids: Sequence[int],
        field: str,
        options: GenerateOptions,
        grammar: LoadedGrammar | None = None,
        logprobs: int | None = None,
    ) -> tuple[Job, asyncio.Queue[Event]]:
        """Queue a job; `field` of the request is where its ids come from."""
        self._check_ids(ids, field)
        if not ids:
            raise HttpError(400, f"{field}: the prompt has no tokens; give some text", field)
        if len(ids) >= self._worker.context:
            message = f"{field}: the prompt has {len(ids)} tokens, the context is {self._worker.context}"
            raise HttpError(400, message, field, "context_length_exceeded")
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def deliver(event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens, and the engine goes on
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = Job(ids, options, deliver, grammar, logprobs)
        self._worker.submit(job)
        return job, events

    async def _whole(
        self, request: Request, job: Job, events: asyncio.Queue[Event]
    ) -> tuple[str, list[TokenLogprob], Done]:
        """The whole answer; a client that leaves ends the job."""
        gone = asyncio.ensure_future(request.receive())
        text: list[str] = []
        entries: list[TokenLogprob] = []
        try:
            while True:
                next_event = asyncio.ensure_future(events.get())
                await asyncio.wait({gone, next_event}, return_when=asyncio.FIRST_COMPLETED)
                if not next_event.done():
                    next_event.cancel()
                    raise HttpError(499, "the client has left")
                event = next_event.result()
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Done):
                    return "".join(text), entries, event
                text.append(event.text)
                entries += event.logprobs
        finally:
            gone.cancel()
            job.cancelled = True


def _answering(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Exception as error:
            return http_error(error).response()

    return answer


async def _not_found(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    return HttpError(status, f"{request.method} {request.url.path}: no such endpoint").response()


async def _internal(request: Request, error: Exception) -> Response:
    return http_error(error).response()
