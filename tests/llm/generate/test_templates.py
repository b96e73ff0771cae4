"""Chat templates: rendered as the transformers library does (by make_templates.py); what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyggml.errors import ModelError
from pyggml.llm.generate.templates import ChatTemplate, find_template
from pyggml.llm.model import load_model
from pyggml.llm.vocab import Vocab

from . import make_templates

CASES: list[dict[str, Any]] = json.loads((make_templates.FOLDER / "expected.json").read_text(encoding="utf-8"))
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def vocab(tiny: Path) -> Vocab:
    return load_model(tiny, vocab_only=True).vocab


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['template']}-{c['variables']}")
def test_as_transformers(vocab: Vocab, case: dict[str, Any]) -> None:
    template = ChatTemplate("of a test", make_templates.TEMPLATES[case["template"]])
    variables = {"add_generation_prompt": False, **make_templates.VARIABLES[case["variables"]]}
    if "text" in case:
        assert template.render(vocab=vocab, **variables) == case["text"]
    else:
        with pytest.raises(ModelError, match="the chat template of a test: ") as e:
            template.render(vocab=vocab, **variables)
        assert case["error"].partition(" (<")[0] in str(e.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% generation %}x",
        "{% continue %}",
        "{{ 1 / 0 }}",
        "{{ none.strip() }}",
        "{{ (1).real.denominator.x.y }}",
        "{{ messages[0].content.format.__globals__ }}{{ 1 + 'a' }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10000000) | list }}",
        "{{ 'x' | nofilter }}",
        "{% include 'x' %}",
        "{{ strftime_now(3) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages | tojson(indent='x', nothing=1) }}",
        "{{ '%d' | format('x') }}",
    ],
)
def test_what_goes_wrong_inside_is_a_model_error(vocab: Vocab, source: str) -> None:
    with pytest.raises(ModelError, match="the chat template of a test: "):
        ChatTemplate("of a test", source).render(USER, vocab)


def test_loop_controls_inside_generation(vocab: Vocab) -> None:
    body = "{% generation %}{% if m == 'b' %}{% continue %}{% endif %}{{ m }}{% endgeneration %}"
    source = "{% for m in 'abc' %}" + body + "{% endfor %}"
    assert ChatTemplate("of a test", source).render(USER, vocab) == "ac"


def test_the_date(vocab: Vocab) -> None:
    text = ChatTemplate("of a test", "{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%%') }}").render(USER, vocab)
    assert len(text) == 12 and text[4] == text[7] == "-" and text.endswith(" %")


def test_only_json_values_reach_a_template(vocab: Vocab) -> None:
    template = ChatTemplate("of a test", "{{ messages[0].content }} {{ n }}")

    class Dumped:
        def model_dump(self) -> dict[str, Any]:
            return {"role": "user", "content": "hi"}

    assert template.render(USER, vocab, n=(1, {"a": None})) == "hi [1, {'a': None}]"
    assert template.render(USER, vocab, n=Dumped()) == "hi {'role': 'user', 'content': 'hi'}"
    with pytest.raises(ModelError, match=r"variables\['n'\] must be made of what JSON has, not of bytes"):
        template.render(USER, vocab, n=b"x")
    with pytest.raises(ModelError, match=r"messages\[0\]\['content'\]\[0\]"):
        template.render([{"role": "user", "content": [object()]}], vocab)
    for bad in ("hi", ["hi"], None, 3, {"role": "user"}):
        with pytest.raises(ModelError, match="messages must be a list of dicts"):
            template.render(bad, vocab)  # pyright: ignore[reportArgumentType]


def test_the_template_for_tools(vocab: Vocab) -> None:
    kv = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with {{ tools | tojson }}"}
    template = find_template(None, kv)
    assert template.render(USER, vocab) == template.render(USER, vocab, tools=[]) == "plain"
    assert template.render(USER, vocab, tools=[{"<a>": 1}]) == 'with [{"<a>": 1}]'
