"""A reply that the caller began: what the prompt is, and how what follows is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pyggml as gg
from pyggml.errors import ModelError
from pyggml.llm.openai.chat import read_chat
from pyggml.llm.openai.formats import FUNCTIONARY_V32, HARMONY, HERMES, PLAIN

ASK = {"role": "user", "content": "Hi"}
BODY = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}|{% endfor %}"
PLAIN_TEMPLATE = BODY + "{% if add_generation_prompt %}<assistant>{% endif %}"
THINKS = BODY + "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"  # and shows no reasoning
SHOWS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}"
    "\n</think>\n{% endif %}{{ m.content }}|{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
ALWAYS_THINKS = "{% for m in messages %}{{ '<think>' if m.role == 'assistant' }}{{ m.content }}{% endfor %}"
LEAVES_OUT = (
    "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{{ '>' if add_generation_prompt else '' }}"
)
EMPTY_THOUGHT = PLAIN_TEMPLATE.replace("<assistant>{% endif", "<assistant><think></think>{% endif")


@pytest.mark.parametrize(
    ("template", "last", "part", "text"),
    [
        (PLAIN_TEMPLATE, {"content": "  Well, "}, "content", "<user>Hi|<assistant>  Well, "),
        (PLAIN_TEMPLATE, {"content": [{"type": "text", "text": "So"}]}, "content", "<user>Hi|<assistant>So"),
        (PLAIN_TEMPLATE, {"content": ""}, "content", "<user>Hi|<assistant>"),
        (THINKS, {"content": "So"}, "content", "<user>Hi|<assistant>So"),
        (THINKS, {"content": "<think>a"}, "content", "<user>Hi|<assistant><think>a"),
        (THINKS, {"reasoning_content": "a "}, "reasoning_content", "<user>Hi|<assistant><think>\na "),
        (EMPTY_THOUGHT, {"reasoning_content": "a"}, "reasoning_content", "<user>Hi|<assistant><think>\na"),
        (SHOWS, {"reasoning_content": "a"}, "reasoning_content", "<user>Hi|<assistant><think>\na"),
        (SHOWS, {"reasoning_content": "a", "content": "b"}, "content", "<user>Hi|<assistant><think>\na\n</think>\nb"),
        (ALWAYS_THINKS, {"content": "So"}, "content", "Hi<think></think>\n\nSo"),
        (LEAVES_OUT, {"content": "So"}, "content", "Hi>So"),
    ],
)
def test_prompts(tiny: Path, template: str, last: dict[str, Any], part: str, text: str) -> None:
    model = gg.load_model(tiny, vocab_only=True)
    chat = read_chat(model, [ASK, {"role": "assistant", **last}], chat_template=template, part=part)
    assert chat.text == text
    begun = str(last.get(part))
    assert chat.thinking == (part == "reasoning_content" or begun.startswith("<think>"))


def test_no_generation_prompt(tiny: Path) -> None:
    model = gg.load_model(tiny, vocab_only=True)
    chat = read_chat(model, [ASK], chat_template=PLAIN_TEMPLATE, add_generation_prompt=False)
    assert chat.text == "<user>Hi|"


@pytest.mark.parametrize(
    ("messages", "part", "options", "says"),
    [
        ([ASK], "content", {}, "none of the assistant"),
        ([], "content", {}, "none of the assistant"),
        ([5], "content", {}, "none of the assistant"),
        ([5, {"role": "assistant", "content": "a"}], "content", {}, "messages must be a list of dicts"),
        ([{"role": "assistant", "tool_calls": [{}]}], "content", {}, "tool_calls"),
        ([{"role": "assistant", "content": "a"}] * 2, "content", {}, "both"),
        ([{"role": "assistant", "content": "a"}], "thoughts", {}, "reasoning_content"),
        ([{"role": "assistant", "content": "a"}], "content", {"response_format": {"type": "json_object"}}, "schema"),
        ([{"role": "assistant", "content": 5}], "content", {}, "content must be text"),
        ([{"role": "assistant", "reasoning_content": "a"}], "reasoning_content", {"sign": "<|channel|>"}, "shows no"),
    ],
)
def test_what_cannot_be_continued(tiny: Path, messages: Any, part: str, options: Any, says: str) -> None:
    model = gg.load_model(tiny, vocab_only=True)
    template = PLAIN_TEMPLATE + f"{{# {options.pop('sign', '')} #}}"
    with pytest.raises(ModelError, match=says):
        read_chat(model, messages, chat_template=template, part=part, **options)


@pytest.mark.parametrize("form", [PLAIN, HERMES, HARMONY, FUNCTIONARY_V32])
@pytest.mark.parametrize("thinking", [False, True])
def test_spaces_that_go_on_count(form: Any, thinking: bool) -> None:
    """However much of the reply is there. Two texts that are put together have the space between their words."""
    if thinking and form is FUNCTIONARY_V32:
        pytest.skip("this family does not reason")
    said = form.opened[thinking] + " that is\nso"
    for n in range(len(form.opened[thinking]), len(said) + 1):
        inside = thinking and form.ends_reasoning
        got = form.parse(said[:n], n == len(said), frozenset(), inside, goes_on=True)
        shown, other = (got.reasoning, got.content) if thinking else (got.content, got.reasoning)
        want = said[len(form.opened[thinking]) : n].rstrip()
        assert shown.rstrip() == want and not other and not got.calls
