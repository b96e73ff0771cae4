"""Tool calls and reasoning, in the form of each family of models, whole and as they come."""

# ruff: noqa: E501  (what models say is shown as it is)
from __future__ import annotations

import json
from typing import Any

import pytest

from pyggml.llm.openai.formats import (
    COMMAND_R,
    COMMAND_R7B,
    DEEPSEEK,
    FUNCTIONARY,
    FUNCTIONARY_V32,
    HARMONY,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    PLAIN,
    Format,
    find_format,
)
from pyggml.llm.openai.reply import json_prefix

from ...linear import assert_linear

NAMES = frozenset(("get_weather", "add"))
BERN: tuple[str, dict[str, Any]] = ("get_weather", {"city": "Bern ☀", "days": 2})
ADD: tuple[str, dict[str, Any]] = ("add", {"a": 1, "b": [2, None]})
W, A = json.dumps(BERN[1]), json.dumps(ADD[1])
D = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    ("form", "text", "content", "reasoning", "calls"),
    [
        (HERMES, "Hello <b> {x}.", "Hello <b> {x}.", "", []),
        (HERMES, f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {W}}}\n</tool_call>', "I look.", "", [BERN]),
        (HERMES, f'<tool_call>{{"name": "add", "arguments": {A}}}</tool_call>\n<tool_call>{{"name": "get_weather", "arguments": {W}}}',
         "", "", [ADD, BERN]),
        (HERMES, "<think>\nhm < tool\n</think>\n\nYes.", "Yes.", "hm < tool", []),
        (HERMES, f'<think>a</think><tool_call>{{"name": "add", "arguments": {json.dumps(A)}}}</tool_call>', "", "a", [ADD]),
        (HERMES, "<tool_call>no JSON</tool_call> x", "<tool_call>no JSON</tool_call> x", "", []),
        (HERMES, "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern ☀\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
         "</function>\n</tool_call>", "", "", [BERN]),
        (LLAMA3, f'{{"name": "get_weather", "parameters": {W}}}', "", "", [BERN]),
        (LLAMA3, f'<|python_tag|>{{"name": "get_weather", "parameters": {W}}}; {{"name": "add", "parameters": {A}}}', "", "", [BERN, ADD]),
        (LLAMA3, '<|python_tag|>add.call(a=1, b=[2, None])', "", "", [ADD]),
        (LLAMA3, "<|python_tag|>print(1)", "", "", [("python", {"code": "print(1)"})]),
        (LLAMA3, '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', "", []),
        (LLAMA3, "Plain, {with} braces", "Plain, {with} braces", "", []),
        (MISTRAL, f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {W}, "id": "a1b2c3d4e"}}]', "", "", [BERN]),
        (MISTRAL, f'Well.[TOOL_CALLS] [{{"name": "add", "arguments": {A}}}, {{"name": "get_weather", "arguments": {W}}}]', "Well.", "", [ADD, BERN]),
        (MISTRAL_ARGS, f"[THINK]so[/THINK][TOOL_CALLS]get_weather[CALL_ID]x1[ARGS]{W}[TOOL_CALLS]add[ARGS]{A}", "", "so", [BERN, ADD]),
        (MISTRAL_ARGS, f"[TOOL_CALLS]add{A}", "", "", [ADD]),
        (DEEPSEEK, "ok<｜tool▁calls▁begin｜>" + D.format("get_weather", W) + "\n" + D.format("add", A) + "<｜tool▁calls▁end｜>", "ok", "", [BERN, ADD]),
        (DEEPSEEK, f"<think>x</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{A}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", "x", [ADD]),
        (HARMONY, "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant<|channel|>final<|message|>It is 4.", "It is 4.", "Let me see.", []),
        (HARMONY, f"<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{W}<|call|>",
         "", "a", [BERN]),
        (HARMONY, f" to=functions.add<|channel|>commentary json<|message|>{A}", "", "", [ADD]),
        (HARMONY, "plain", "plain", "", []),
        (FUNCTIONARY, f"Hm <function=get_weather>{W}</function><function=add>{A}</function>", "Hm", "", [BERN, ADD]),
        (FUNCTIONARY_V32, f"all\nHello.\n>>>get_weather\n{W}>>>add\n{A}", "Hello.", "", [BERN, ADD]),
        (FUNCTIONARY_V32, f"get_weather\n{W}", "", "", [BERN]),
        (COMMAND_R, f'Plan.\nAction: ```json\n[{{"tool_name": "get_weather", "parameters": {W}}}, {{"tool_name": "directly_answer", "parameters": {{}}}}]\n```',
         "Plan.", "", [BERN]),
        (COMMAND_R7B, f'<|START_THINKING|>t<|END_THINKING|><|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "add", "parameters": {A}}}]<|END_ACTION|>',
         "", "t", [ADD]),
        (COMMAND_R7B, "<|START_THINKING|>t<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>", "Hi", "t", []),
        (PLAIN, f'{{"name": "add", "arguments": {A}}}', "", "", [ADD]),
        (PLAIN, "[1, 2]", "[1, 2]", "", []),
    ],
)  # fmt: skip
def test_a_reply_is_read(form: Format, text: str, content: str, reasoning: str, calls: list[Any]) -> None:
    reply = form.parse(text, True, NAMES)
    assert (reply.content, reply.reasoning) == (content, reasoning)
    assert [(c.name, json.loads(c.arguments)) for c in reply.calls] == calls
    said, thought, n = "", "", 0
    for i in range(len(text) + 1):  # as it comes: only ever more
        part = form.parse(text[:i], False, NAMES)
        assert part.content.startswith(said) and part.reasoning.startswith(thought) and len(part.calls) >= n
        said, thought, n = part.content, part.reasoning, len(part.calls)
    assert content.startswith(said) and reasoning.startswith(thought) and n <= len(calls)


def test_reasoning_that_began_in_the_prompt() -> None:
    assert HERMES.opens_reasoning("<think>\n") and not HERMES.opens_reasoning("<think>\n\n</think>\n\n")
    reply = HERMES.parse("so\n</think>\n\nYes", True, NAMES, thinking=True)
    assert (reply.reasoning, reply.content) == ("so", "Yes")
    assert HERMES.parse("so", True, NAMES, thinking=True).reasoning == "so"


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL, DEEPSEEK, HARMONY, FUNCTIONARY, FUNCTIONARY_V32, COMMAND_R, COMMAND_R7B, PLAIN], ids=lambda f: f.name)  # fmt: skip
def test_nonsense_is_text(form: Format) -> None:
    for text in (
        "",
        " ",
        "{",
        "[",
        "<",
        "{" * 3000,
        "[TOOL_CALLS][",
        "<tool_call>",
        "<|python_tag|>x.call(",
        "Action: ```json\n[",
        "<|channel|>",
    ):
        for done in (False, True):
            form.parse(text, done, NAMES)


@pytest.mark.parametrize(
    ("source", "name"),
    [("x<tool_call>y", "hermes"), ("<|channel|>", "harmony"), ("[TOOL_CALLS]", "mistral"), ("{{ messages }}", "plain")],
)
def test_formats_are_found_by_the_template(source: str, name: str) -> None:
    assert find_format(source).name == name


@pytest.mark.parametrize(
    "text",
    [
        'x.call(a=b"z")', "x.call(a={1, 2})", "x.call(a=1j)", "x.call(a=...)", "x.call(a={(1, 2): 3})", "x.call(a=1e999)",
        "x.call(**{})", "x.call(1)", '{"name": "x", "parameters": {"a": NaN}}', '{"name": "x", "parameters": [1e999]}',
    ],
)  # fmt: skip
def test_a_call_with_what_json_does_not_have_is_code(text: str) -> None:
    (call,) = LLAMA3.parse(f"<|python_tag|>{text}", True, NAMES).calls
    assert (call.name, json.loads(call.arguments)) == ("python", {"code": text})


def test_escapes_that_python_does_not_know_are_no_warning() -> None:
    (call,) = LLAMA3.parse(r"<|python_tag|>x.call(a='\d')", True, NAMES).calls
    assert json.loads(call.arguments) == {"a": r"\d"}


def test_arguments_are_json_that_every_reader_takes() -> None:
    (call,) = FUNCTIONARY.parse('<function=add>{"a": "x\ny"}</function>', True, NAMES).calls
    assert json.loads(call.arguments) == {"a": "x\ny"}
    assert not FUNCTIONARY.parse('<function=add>{"a": NaN}</function>', True, NAMES).calls
    deep = '{"name": "add", "arguments": ' + "[" * 900 + "]" * 900 + "}"
    HERMES.parse(f"<tool_call>{deep}</tool_call>", True, NAMES)


@pytest.mark.parametrize(
    ("form", "begin", "part"),
    [
        (HERMES, "<tool_call><function=f>", "<parameter=a>"),
        (HERMES, "<tool_call>", "<function="),
        (HERMES, "", "<tool_call>{}</tool_call>"),
        (MISTRAL_ARGS, "", "[TOOL_CALLS]a"),
        (FUNCTIONARY_V32, "", ">>>all\nx"),
        (HARMONY, "", "<|end|><|message|>x"),
    ],
    ids=lambda x: x.name if isinstance(x, Format) else "",
)
def test_reading_takes_time_in_proportion_to_the_reply(form: Format, begin: str, part: str) -> None:
    assert_linear(lambda n: form.parse(begin + part * n, True, NAMES), 2000)


SEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
COHERE = '{"tool_call_id": "0", "tool_name": "f", "parameters": {"city": "Ulm", "n": 3}}'
VALUES: list[Any] = [
    {},
    {"a": [], "b": {"c": [1, 2.5, -3e9, 1.0]}, "d": None, "e": True},
    {"text": 'a "quoted" \\ back\nslash \u00e9 \U0001f98a \x01', "n": 12},
    {"x": "\\", "y": '\\\\"', "z": ["", {"": 0}]},
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("ascii", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
def test_the_beginning_of_json_is_that_of_the_whole(value: Any, ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    whole = json.dumps(value, ensure_ascii=False)
    before = ""
    for i in range(len(text) + 1):
        got = json_prefix(text[:i])
        assert got.startswith(before) and whole.startswith(got)
        before = got
    assert before == json_prefix(text + "} more") == whole
    assert json_prefix('{"a": 1, b') == '{"a": 1, ' and json_prefix('{"a": nil,') == '{"a": '


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, '<tool_call>\n{"name": "f", "arguments": {"city":"Ulm","n":3}}\n</tool_call>'),
        (LLAMA3, '{"name": "f", "parameters": {"city": "Ulm", "n": 3}}'),
        (FUNCTIONARY, '<function=f>{"city": "Ulm", "n": 3}</function>'),
        (MISTRAL_ARGS, '[TOOL_CALLS]f[ARGS]{"city": "Ulm", "n": 3}'),
        (DEEPSEEK, SEEK.format('function<｜tool▁sep｜>f\n```json\n{"city": "Ulm", "n": 3}\n```')),
        (DEEPSEEK, SEEK.format('f<｜tool▁sep｜>{"city": "Ulm", "n": 3}')),
        (COMMAND_R7B, f"<|START_ACTION|>[\n{COHERE}\n]<|END_ACTION|>"),
        (COMMAND_R, f"Action: ```json\n[{COHERE}]\n```"),
        (HARMONY, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Ulm", "n": 3}<|call|>'),
    ],
)
def test_a_call_that_is_being_written(form: Format, text: str) -> None:
    (whole,) = form.parse(text, True, frozenset({"f"})).calls
    seen: list[str] = []
    for i in range(len(text)):
        reply = form.parse(text[:i], False, frozenset({"f"}))
        if reply.begun is not None:
            assert reply.begun.name == "f" and whole.arguments.startswith(reply.begun.arguments)
            seen.append(reply.begun.arguments)
    assert len(set(seen)) > 5 and seen == sorted(seen, key=len)


def test_several_calls_of_a_list_that_is_being_written() -> None:
    """Those that are whole stay as they are, and what is broken off is no call."""
    text = f"<|START_ACTION|>[{COHERE}, {COHERE.replace('Ulm', 'Rom')}]<|END_ACTION|>"
    whole = COMMAND_R7B.parse(text, True, NAMES).calls
    assert [json.loads(c.arguments)["city"] for c in whole] == ["Ulm", "Rom"]
    for i in range(len(text)):
        for done in (False, True):
            reply = COMMAND_R7B.parse(text[:i], done, NAMES)
            assert reply.calls == whole[: len(reply.calls)] and not (done and reply.begun)
            if reply.begun is not None:
                assert whole[len(reply.calls)].arguments.startswith(reply.begun.arguments)
