"""What of a request reaches the model's chat template."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from text import build

from coli.server.prompts import conversation_ids
from coli.server.requests import ChatRequest
from coli.text.chat import ChatTemplate
from coli.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.thinking | default('-') }}:{{ m.reasoning_content | default('-') }}:"
    "{{ m.content }};{% endfor %}{{ reasoning_effort | default('medium') }}"
)


def shown(path: Path, **body: Any) -> str:
    tokenizer = Tokenizer.load(build.folder(path, build.byte_level(), {"chat_template": TEMPLATE}))
    llm: Any = SimpleNamespace(tokenizer=tokenizer, chat_template=ChatTemplate.load(path))
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]} | body)
    return tokenizer.decode(conversation_ids(llm, request, None, None))


def test_reasoning_effort_is_the_template_s_to_read(tmp_path: Path) -> None:
    assert shown(tmp_path) == "user:-:-:hi;medium"
    assert shown(tmp_path, reasoning_effort="high") == "user:-:-:hi;high"


def test_earlier_reasoning_has_both_names_that_templates_use(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "yo", "reasoning_content": "hm"}
    assert shown(tmp_path, messages=[said]) == "assistant:hm:hm:yo;medium"
