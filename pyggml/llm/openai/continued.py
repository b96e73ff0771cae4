"""A chat whose last message is the beginning of the reply: the model goes on writing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pyggml.errors import ModelError, one_of

from .formats import Format
from .messages import text_of

PARTS = ("content", "reasoning_content")  # the members of a message that can be continued
_MARK = "(the text goes on here)"  # stands for the beginning while the template writes the chat


class Render(Protocol):
    """Writes a chat, up to the place where a reply begins, or not."""

    def __call__(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str: ...


def check_continued(messages: Sequence[Mapping[str, Any]], part: str) -> None:
    """Raises ModelError unless `part` of the last message can be continued."""
    one_of("continue_final_message", part, PARTS, ModelError)
    roles = [m.get("role") if isinstance(m, Mapping) else None for m in messages[-2:]]  # pyright: ignore[reportUnnecessaryIsInstance]
    if roles[-1:] != ["assistant"]:
        raise ModelError("continue_final_message: the last message is none of the assistant")
    if messages[-1].get("tool_calls"):
        raise ModelError("continue_final_message: a message with tool_calls cannot be continued")
    if roles == ["assistant", "assistant"]:
        raise ModelError("continue_final_message: the last two messages are both of the assistant")


def is_reasoning(messages: Sequence[Mapping[str, Any]], part: str, form: Format) -> bool:
    """Whether what is continued ends within reasoning that a text will end."""
    begin, end = form.reasoning
    begun = text_of(messages[-1].get(part), len(messages) - 1)
    within = part == "reasoning_content" or (begun.lstrip().startswith(begin) and end not in begun)
    return within and form.ends_reasoning


def continued(render: Render, messages: Sequence[Mapping[str, Any]], part: str, form: Format) -> str:
    """The text of a chat up to the end of `part` of its last message, as the template writes that message. Where the
    template leaves the message out, the beginning follows the place where a reply begins."""
    *before, last = messages
    begun, (begin, end) = text_of(last.get(part), len(before)), form.reasoning
    thinks = part == "content" and begun.lstrip().startswith(begin)  # the content has its own reasoning
    if not thinks:
        marked = {**last, part: _MARK} if part == "content" else {**last, "content": "", part: _MARK}
        head, found, _ = render([*before, marked], False).rpartition(_MARK)
        if found:
            return f"{head}{end}\n\n{begun}" if part == "content" and form.opens_reasoning(head) else head + begun
    text = render(before, True)
    if part == "content" and not thinks:
        return f"{text}{end}\n\n{begun}" if form.opens_reasoning(text) else text + begun
    if not form.ends_reasoning:
        raise ModelError("continue_final_message: the chat template shows no reasoning")
    for mark in (end, begin):  # an empty reasoning, or one that the template begins
        if text.rstrip().endswith(mark):
            text = text.rstrip().removesuffix(mark)
    return text + begun if thinks else f"{text}{begin}\n{begun}"
