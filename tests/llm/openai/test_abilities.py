"""What chat templates can do is found by rendering them."""

from __future__ import annotations

import pyggml as gg
from pyggml.llm.generate.templates import ChatTemplate
from pyggml.llm.openai.abilities import abilities

_TEXT = "{% for m in messages %}{{ m.role + ': ' + m.content }}\n{% endfor %}"
_ALL = """
{%- if tools %}{{ tools | tojson }}{% endif %}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}
{%- for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}
{%- if m.reasoning_content and preserve_thinking %}{{ m.reasoning_content }}{% endif %}
{%- for c in m.tool_calls or () %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}
{% endfor %}"""
_ONE_CALL = """
{%- if not tools %}{{ raise_exception("tools are missing") }}{% endif %}
{%- for m in messages if m.role != "system" %}{% if m.content is string -%}
{{ raise_exception("parts alone") }}{% endif %}
{{ m.content[0].text }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments }}{% endif %}{% endfor %}"""


def _can(source: str, tool_use: str | None = None) -> set[str]:
    found = abilities(ChatTemplate("of the test", source, tool_use=tool_use), gg.load_model().vocab)
    return {name.removeprefix("supports_") for name, value in found.items() if value}


def test_abilities() -> None:
    assert _can(_TEXT) == {"string_content", "system_role"}
    every = {"string_content", "typed_content", "system_role", "tools", "tool_calls", "parallel_tool_calls"}
    every |= {"object_arguments", "preserve_reasoning", "reasoning_effort"}
    assert _can(_ALL) == every
    assert not _can(_ONE_CALL) and not _can("{{ no(such) }}")
    assert "tools" in _can(_TEXT, _ALL)
