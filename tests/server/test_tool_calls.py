import pytest

from coli.server.tool_calls import Call, certain_text, parse_calls


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [Call("f", '{"a": 1}')]),
        ('ok <tool_call>{"name":"f"}</tool_call><tool_call>{"name":"g"}</tool_call>', "ok",
         [Call("f", "{}"), Call("g", "{}")]),
        ('[TOOL_CALLS] [{"name": "g", "arguments": {}}]', "", [Call("g", "{}")]),
        ('{"name": "f", "parameters": {"x": "y"}}', "", [Call("f", '{"x": "y"}')]),
        ('{"name": "unknown"}', '{"name": "unknown"}', []),
        ("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary to=functions.f "
         '<|constrain|>json<|message|>{"a": 1}', "", [Call("f", '{"a": 1}')]),
        ("<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant to=functions.g<|channel|>commentary json"
         "<|message|>{}", "I ask.", [Call("g", "{}")]),
        ("<|channel|>commentary to=functions.h<|message|>{}", "<|channel|>commentary to=functions.h<|message|>{}", []),
        ("<|channel|>final<|message|>a", "<|channel|>final<|message|>a", []),
        ("plain", "plain", []),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
        ('{"a": 1}', '{"a": 1}', []),
    ],
)  # fmt: skip
def test_calls_of_known_spellings_are_found_and_text_stays_text(text, rest, calls):
    assert parse_calls(text, {"f", "g"}) == (rest, calls)


def test_nothing_of_a_call_is_shown_as_text():
    text = 'so <tool_call>{"name": "f"}</tool_call>'
    assert [certain_text(text[:end]) for end in range(len(text) + 1)] == [0, 1, 2, 3] + [3] * (len(text) - 3)
    assert certain_text('{"name"') == 0
    assert certain_text("a < b") == 5
