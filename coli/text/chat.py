"""A model's chat template: messages -> the text its training used, by jinja2 in a sandbox.

Finds the template as transformers does (chat_template.jinja, chat_template.json, tokenizer_config.json) and offers the
helpers templates expect. Templates are downloaded code: the sandbox forbids attributes and mutation, sizes are capped.
Errors name file and line; a template that refuses a conversation is TemplateRefusedError with the template's reason.
"""

from __future__ import annotations

import datetime
import functools
import json
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from coli.errors import ChatTemplateError, TemplateRefusedError, TokenizerError
from coli.text.files import named_tokens, read_json_object, read_text, type_name
from coli.text.template_limits import RENDERED_CAP, TEMPLATE_CAP, LimitedEnvironment, start_counting

Message = Mapping[str, Any]


class _Refused(jinja2.TemplateError):
    """The template called raise_exception."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`: marks what training learns from; here only its content matters."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes < > & ' for HTML, which models never saw.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled template and where it came from."""

    def __init__(self, source: str, place: str, special_tokens: Mapping[str, str] | None = None):
        if len(source) > TEMPLATE_CAP:
            raise ChatTemplateError(f"{place}: longer than {TEMPLATE_CAP} characters")
        self.place = place
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        environment = LimitedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters.update(tojson=_tojson)
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"{place}: line {error.lineno}: {error.message}") from None
        except (RecursionError, SyntaxError, MemoryError):  # Python's compiler has limits of its own
            raise ChatTemplateError(f"{place}: nested too deeply") from None
        except Exception as error:  # such as numbers of thousands of digits
            raise ChatTemplateError(f"{place}: cannot be compiled: {' '.join(str(error).split())[:200]}") from None

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """The template of a model folder, None when it has none."""
        found = _find(folder)
        if found is None:
            return None
        path = folder / "tokenizer_config.json"
        return cls(found[0], found[1], named_tokens(read_json_object(path) or {}, path))

    @functools.cached_property
    def _variables(self) -> set[str]:
        """What the template asks for."""
        return jinja2.meta.find_undeclared_variables(self._template.environment.parse(self.source))

    @property
    def knows_thinking(self) -> bool:
        """Whether the template asks if the model should think."""
        return not self._variables.isdisjoint(("enable_thinking", "thinking"))

    @property
    def knows_tools(self) -> bool:
        """Whether the template shows the model tools."""
        return "tools" in self._variables

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as text; messages: {"role", "content", ...} each.

        Raises TemplateRefusedError with the template's own reason, ChatTemplateError with file and line for the rest.
        """
        if enable_thinking is not None:
            variables.update(enable_thinking=enable_thinking, thinking=enable_thinking)
        context = {
            **self._special_tokens,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        pieces, size = [], 0
        start_counting()
        try:
            for piece in self._template.generate(context):
                size += len(piece)
                if size > RENDERED_CAP:
                    raise jinja2.exceptions.SecurityError("output too long")
                pieces.append(piece)
        except _Refused as refusal:
            raise TemplateRefusedError(f"the model's chat template refuses this conversation: {refusal}") from None
        except (RecursionError, MemoryError):
            raise ChatTemplateError(f"{self.place}: the template does not end") from None
        except Exception as error:  # template code can raise anything
            line = _template_line(error)
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ChatTemplateError(f"{self.place}: line {line}: {reason}") from None
        return "".join(pieces)


def _template_line(error: Exception) -> int:
    """The template's line an exception passed through last (jinja2 rewrites tracebacks to template lines)."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame.lineno or 1 for frame in reversed(frames) if frame.filename == "<template>"), 1)


def _find(folder: Path) -> tuple[str, str] | None:
    """(source, where it stands) of a folder's default template."""
    path = folder / "chat_template.jinja"
    source = read_text(path, TEMPLATE_CAP)
    if source is not None:
        return source, str(path)
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        field = (read_json_object(path) or {}).get("chat_template")
        if field is not None:
            place = f"{path}: chat_template"
            return default_of(field, place), place
    return None


def default_of(field: object, place: str) -> str:
    """The template meant by the chat_template at `place`: text, or the "default" (or only) one of a list."""
    if isinstance(field, list):
        named = {}
        for entry in field:
            if not isinstance(entry, dict) or not all(isinstance(entry.get(k), str) for k in ("name", "template")):
                raise TokenizerError(f"{place}: expected entries with name and template")
            named[entry["name"]] = entry["template"]
        if "default" not in named and len(named) != 1:
            raise TokenizerError(f"{place}: no template named default, found {', '.join(named) or 'none'}")
        field = named.get("default", next(iter(named.values())))
    if not isinstance(field, str):
        raise TokenizerError(f"{place}: expected text or a list, found {type_name(field)}")
    return field
