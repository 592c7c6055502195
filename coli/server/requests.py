"""What clients may send: one model per endpoint, unknown fields refused by name, sizes bounded.

Pydantic checks types strictly ("1" is no number). The methods turn a request into our frozen options; nothing here
knows HTTP or the engine.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from coli.errors import GrammarError
from coli.grammar.load import GRAMMAR_TAG, SCHEMA_TAG, LoadedGrammar, read_grammar
from coli.options import GenerateOptions, SamplerOptions

MAX_MESSAGES = 4096
MAX_TEXT = 4 * 2**20  # characters of one text
MAX_STOPS = 16
MAX_LOGPROBS = 20
UNIONS = ("content", "stop", "prompt")  # fields of several types: what follows their names in an error is a type's
STRICT = (
    "strict is not available: grammars and schemas speed the answer up here, they do not force it; "
    "send strict: false (or leave it out) and check the answer"
)


class RefusedFieldError(ValueError):
    """A field has a value this server cannot serve; `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Strict(BaseModel):
    """Unknown fields are errors, types are not converted, and what is no number (JSON readers take NaN) is none."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False)


class StreamOptions(Strict):
    """What a stream tells beside the text: usage behind it, and which text was drafted (ours)."""

    include_usage: bool = False
    include_drafts: bool = False


class JsonSchema(Strict):
    """A schema to draft by; `strict: true` is refused."""

    name: str | None = Field(None, max_length=256)
    description: str | None = Field(None, max_length=MAX_TEXT)
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form an answer is expected to have; drafts follow it, nothing enforces it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(Strict):
    """A function the model may call, for the chat template to show."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = Field(None, max_length=MAX_TEXT)
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """One of `tools`; functions only."""

    type: Literal["function"]
    function: Function


class CalledFunction(Strict):
    """Name and arguments (JSON text, as the API has them) of a call in an earlier answer."""

    name: str = Field(max_length=256)
    arguments: str = Field(max_length=MAX_TEXT)


class ToolCall(Strict):
    """A call in an earlier answer; `index` is what streams number them by, and ignored."""

    id: str | None = Field(None, max_length=256)
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class TextPart(Strict):
    """A part of a message; text is the only kind there is here."""

    type: Literal["text"]
    text: str = Field(max_length=MAX_TEXT)


class Message(Strict):
    """One turn of a conversation, at most MAX_TEXT characters in each of its texts."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = Field(None)
    name: str | None = Field(None, max_length=256)
    tool_calls: list[ToolCall] | None = Field(None, max_length=128)
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = Field(None, max_length=MAX_TEXT)
    refusal: str | None = Field(None, max_length=MAX_TEXT)

    @field_validator("content")
    @classmethod
    def _bounded(cls, content: Any) -> Any:
        if isinstance(content, str) and len(content) > MAX_TEXT:
            raise ValueError(f"at most {MAX_TEXT} characters")
        return content

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: text content, tool arguments as objects."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        found: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content or ""}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if self.reasoning_content is not None:
            found["thinking"] = self.reasoning_content  # Harmony's word for it
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return found


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class Generating(Strict):
    """What every generating endpoint takes."""

    model: str | None = Field(None, max_length=1024)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-100, le=100)
    frequency_penalty: float | None = Field(None, ge=-100, le=100)
    seed: int | None = Field(None, ge=0, le=2**64 - 1)
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    grammar: str | None = Field(None, max_length=MAX_TEXT)
    response_format: ResponseFormat | None = None
    n: int | None = 1
    user: str | None = Field(None, max_length=1024)
    metadata: dict[str, str] | None = None
    logit_bias: dict[str, float] | None = None

    @field_validator("stop")
    @classmethod
    def _stops(cls, stop: Any) -> Any:
        texts = [stop] if isinstance(stop, str) else stop or []
        if len(texts) > MAX_STOPS or any(not text or len(text) > 1024 for text in texts):
            raise ValueError(f"at most {MAX_STOPS} texts of 1 to 1024 characters")
        return stop

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    def options(self, defaults: GenerateOptions) -> GenerateOptions:
        """The answer's options: the request's, else the server's. Raises RefusedFieldError."""
        if self.n not in (None, 1):
            raise RefusedFieldError("n", "one answer per request; send n requests with n seeds instead")
        if self.logit_bias:
            raise RefusedFieldError("logit_bias", "not available here")
        if self.stream_options is not None and not self.stream:
            raise RefusedFieldError("stream_options", "only with stream: true")
        base = defaults.sampler

        def pick(name: str) -> Any:
            own = getattr(self, name)
            return getattr(base, name) if own is None else own

        names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
        sampler = SamplerOptions(**{name: pick(name) for name in (*names, "seed")})
        stop = defaults.stop if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return GenerateOptions(
            max_tokens=self.wanted_tokens or defaults.max_tokens,
            stop=stop,
            ignore_eos=self.ignore_eos or defaults.ignore_eos,
            sampler=sampler,
        )

    def draft_grammar(self, json_grammar: str) -> LoadedGrammar | None:
        """The grammar to draft from, if the request names one. Raises RefusedFieldError."""
        wanted = self.response_format
        if wanted is not None and wanted.json_schema is not None and wanted.json_schema.strict:
            raise RefusedFieldError("response_format.json_schema.strict", STRICT)
        if self.grammar is not None:
            if wanted is not None and wanted.type != "text":
                raise RefusedFieldError("grammar", "expected grammar or response_format, found both")
            return _grammar(self.grammar, "grammar", GRAMMAR_TAG)
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return read_grammar(json_grammar, "response_format", GRAMMAR_TAG)
        if wanted.json_schema is None or wanted.json_schema.schema_ is None:
            raise RefusedFieldError("response_format.json_schema.schema", "a schema is needed for type json_schema")
        return _grammar(json.dumps(wanted.json_schema.schema_), "response_format.json_schema.schema", SCHEMA_TAG)


def _grammar(text: str, field: str, tag: str) -> LoadedGrammar:
    try:
        return read_grammar(text, field, tag)
    except GrammarError as error:  # it names the place itself: line and column behind the field's name
        raise RefusedFieldError(field, str(error).removeprefix(f"{tag} {field}").lstrip(": ")) from None


class ChatRequest(Generating):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = Field(None, max_length=32)

    @property
    def template_variables(self) -> dict[str, Any]:
        """What templates read beside the messages, where the client says so."""
        return {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise RefusedFieldError("top_logprobs", "only with logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools to show the model. Raises RefusedFieldError for choices that would need forcing."""
        if self.tool_choice not in (None, "auto", "none"):
            raise RefusedFieldError("tool_choice", "expected auto or none: an answer cannot be forced here")
        for at, tool in enumerate(self.tools or []):
            if tool.function.strict:
                raise RefusedFieldError(f"tools[{at}].function.strict", STRICT)
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


class CompletionRequest(Generating):
    """POST /v1/completions. `prompt`: text, or token ids."""

    prompt: str | list[int] | list[str]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = False
    best_of: int | None = 1
    suffix: str | None = None

    def one_prompt(self) -> str | list[int]:
        """The prompt. Raises RefusedFieldError for what is not available."""
        for name, value, usual in (("echo", self.echo, False), ("best_of", self.best_of, 1)):
            if value not in (None, usual):
                raise RefusedFieldError(name, "not available here")
        if self.suffix is not None:
            raise RefusedFieldError("suffix", "not available here")
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str):
            if len(prompt) != 1:
                raise RefusedFieldError("prompt", "one prompt per request; send several requests instead")
            return prompt[0]
        if len(prompt) > MAX_TEXT:
            raise RefusedFieldError("prompt", f"expected at most {MAX_TEXT} characters")
        return prompt  # type: ignore[return-value]


class GenerateRequest(Strict):
    """POST /generate, the graph tool's endpoint."""

    prompt: str = Field(max_length=MAX_TEXT)
    max_tokens: int = Field(100, ge=1, le=2**31 - 1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=0, le=2**64 - 1)


class TokenizeRequest(Strict):
    """POST /tokenize."""

    content: str = Field(max_length=MAX_TEXT)
    add_special: bool = False
    parse_special: bool = False


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    tokens: list[int] = Field(max_length=2**20)
