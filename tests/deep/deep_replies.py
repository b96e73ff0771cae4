"""Damaged replies of models are read, and random templates are rendered within the limits."""

# ruff: noqa: E501  (what models say is shown as it is)

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyggml.errors import ModelError
from pyggml.llm.generate import jinja
from pyggml.llm.openai import formats
from pyggml.llm.openai.formats import Format

from .workers import attack

FORMS = {f.name: f for f in vars(formats).values() if isinstance(f, Format)}
SOUND = [
    '<think>hm</think>I look.<tool_call>\n{"name": "add", "arguments": {"a": [2, null]}}\n</tool_call>',
    "<tool_call><function=add><parameter=a>\n2\n</parameter></function></tool_call>",
    '<|python_tag|>add.call(a=1, b="x")',
    '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "a1b2c3d4e"}]',
    '[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 1}',
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>',
    '<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.add<|message|>{"a": 1}<|call|>',
    'Hm <function=add>{"a": 1}</function>',
    'all\nHello.\n>>>add\n{"a": 1}',
    'Plan.\nAction: ```json\n[{"tool_name": "add", "parameters": {}}]\n```',
]
BITS = ["NaN", "1e999", "\\ud800", "\0", "\n", "{", "}", "[", "]", '"', "'", ")", "b'z'", "...", "1j", "**{}", "\\d", "<",
        "9" * 5000, "null", "[[" * 600, ">>>", "<|message|>", "```", "é"]  # fmt: skip


def read_damaged(rng: np.random.Generator, _: Path, form: str) -> str:
    text = SOUND[rng.integers(len(SOUND))]
    for _ in range(int(rng.integers(1, 6))):
        i = int(rng.integers(len(text) + 1))
        j = i + int(rng.integers(12))
        other = SOUND[rng.integers(len(SOUND))]
        into = [BITS[rng.integers(len(BITS))], "", text[i:j] * int(rng.integers(1, 5)), other[i:j]]
        text = text[:i] + into[rng.integers(len(into))] + text[j if rng.integers(2) else i :]
    names = frozenset(("add",)) if rng.integers(4) else frozenset[str]()
    FORMS[form].parse(text[: int(rng.integers(len(text) + 1))], False, names)
    reply = FORMS[form].parse(text, True, names)
    assert all(isinstance(c.name, str) and isinstance(c.arguments, str) and isinstance(c.id, str) for c in reply.calls)
    return f"{len(reply.calls)} calls"


@pytest.mark.parametrize("form", FORMS)
def test_replies(form: str, tmp_path: Path) -> None:
    attack(read_damaged, tmp_path, form)


VALUES = [
    "n.x",
    "n.y",
    "'a'",
    "[n.x]",
    "(n.x, n.y)",
    "{'a': n.x}",
    "10 ** 6",
    "range(9999)",
    "messages",
    "m",
    "-3",
    "'%9999999d'",
]
FILTERS = ["join", "list", "string", "tojson(indent=9)", "replace('a', n.x)", "center(10 ** 7)", "indent(10 ** 6)", "slice(10 ** 7)",
           "batch(9, 'x')", "sort", "unique", "upper", "first", "escape", "map('string')", "format(5)", "pprint", "striptags",
           "wordwrap(3)", "round(10 ** 6)", "sum", "length", "select('eq', n.y)"]  # fmt: skip


def render_any(rng: np.random.Generator, _: Path) -> str:
    """A template of random expressions within loops, whose values grow."""

    def value(depth: int) -> str:
        if depth == 0:
            return VALUES[rng.integers(len(VALUES))]
        kind = rng.integers(4)
        if kind == 0:
            return f"({value(depth - 1)} | {FILTERS[rng.integers(len(FILTERS))]})"
        if kind == 1:
            operator = ["+", "*", "~", "%", "**", "==", "in", "-", "//"][rng.integers(9)]
            return f"({value(depth - 1)} {operator} {value(depth - 1)})"
        return value(depth - 1)

    body = "".join(f"{{% set n.{'xy'[rng.integers(2)]} = {value(int(rng.integers(1, 4)))} %}}" for _ in range(3))
    source = (
        "{% set n = namespace(x='ab', y=['c']) %}{% for m in range(30) %}" + body + "{% endfor %}{{ n.x }}{{ n.y }}"
    )
    try:
        jinja.render("of a test", source, {"messages": jinja.plain("messages", [{"role": "user", "content": "hi"}])})
    except ModelError as e:
        return "limit" if "limits." in str(e) else "error"
    return "rendered"


def test_templates(tmp_path: Path) -> None:
    attack(render_any, tmp_path)
