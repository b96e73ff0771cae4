"""What a chat template does with messages, found by rendering chats and looking for their words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pyggml.errors import ModelError

from ..generate.templates import ChatTemplate
from ..vocab import Vocab

_NEEDLE = "needle7"
_USER = {"role": "user", "content": "u"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "e"}}},
    },
}
# What templates of several families read to leave reasoning of earlier turns where it was.
_KEEPS: dict[str, Any] = {
    "enable_thinking": True,
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}


def abilities(template: ChatTemplate, vocab: Vocab) -> dict[str, bool]:
    """What a template, or its own one for chats with tools, can do: `chat_template_caps` of llama-server's /props."""

    def shown(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **variables: Any) -> str:
        source = ChatTemplate(template.name, template.source if template.tool_use is None else template.tool_use)
        try:
            return source.render(messages, vocab, tools=tools, **variables)
        except ModelError:
            return ""

    named = {**_TOOL, "function": {**_TOOL["function"], "name": _NEEDLE}}
    arguments: Any = {"a": "x"}
    if not (one := shown(_with_calls(1, arguments), [named])):
        one = shown(_with_calls(1, arguments := '{"a": "x"}'), [named])
    two = shown(_with_calls(2, arguments), [_TOOL])
    calls = one != shown(_with_calls(0, arguments), [named])
    past = {"role": "assistant", "content": "a", "reasoning_content": _NEEDLE}
    now = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    efforts = ("none", "low", "high", "max")
    return {
        "supports_string_content": _NEEDLE in shown([{"role": "user", "content": _NEEDLE}]),
        "supports_typed_content": takes_parts(template, vocab),
        "supports_tools": _NEEDLE in one,
        "supports_tool_calls": calls,
        "supports_parallel_tool_calls": two not in ("", shown(_with_calls(1, arguments, n_answers=2), [_TOOL])),
        "supports_system_role": _NEEDLE in shown([{"role": "system", "content": _NEEDLE}, _USER]),
        "supports_preserve_reasoning": _NEEDLE in shown([_USER, past, _USER, now, _USER], **_KEEPS),
        "supports_reasoning_effort": len(
            {shown([_USER], enable_thinking=True, reasoning_effort=e, reasoning_strength=e) for e in efforts}
        )
        > 1,
        "supports_object_arguments": calls and takes_objects(template, vocab),
    }


def takes_parts(template: ChatTemplate, vocab: Vocab) -> bool:
    """Whether a template writes the texts of a message whose content is a list of parts."""
    part = {"type": "text", "text": _NEEDLE}
    try:
        text = template.render([{"role": "user", "content": [part]}], vocab)
    except ModelError:
        return False
    return _NEEDLE in text and not any(f"{quote}text{quote}" in text for quote in ("'", '"', "&#39;"))  # a list as such


def takes_objects(template: ChatTemplate, vocab: Vocab) -> bool:
    """Whether a template writes arguments of a call that are an object as JSON; if not, it wants them as text."""
    try:
        text = template.render(_with_calls(1, {_NEEDLE: "x"}), vocab, tools=[_TOOL])
    except ModelError:
        return False
    return not any(f"{quote}{_NEEDLE}{quote}" in text for quote in ("'", "&#39;"))  # Python's spelling, or that in HTML


def _with_calls(n: int, arguments: Any, n_answers: int | None = None) -> list[dict[str, Any]]:
    """A chat with `n` calls of a tool, and an answer to each."""
    ids = [f"12345678{i}" for i in range(max(n, n_answers or 1))]
    calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}} for id in ids[:n]]
    message = {"role": "assistant", "content": ""} | ({"tool_calls": calls} if calls else {})
    answers = [{"role": "tool", "content": "t", "name": "f", "tool_call_id": id} for id in ids]
    return [_USER, message, *answers, {"role": "assistant", "content": "a"}, _USER]
