"""Chat templates: messages to the text that a model was trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from pyggml import limits
from pyggml.errors import ModelError
from pyggml.small_file import read_text

from ..vocab import Vocab


class Message(TypedDict):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


# What transformers calls reasoning, and the older names of it that templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")


def check_message(message: Mapping[str, Any], i: int) -> None:
    """Raise ModelError when message number `i` of a chat lacks its role or its content: templates write "" for them."""
    if not isinstance(message.get("role"), str):
        raise ModelError(f"messages[{i}] has no role")
    if "content" not in message and message["role"] != "assistant":
        raise ModelError(f"messages[{i}] has no content, which only a message of the assistant may lack")


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, run in a sandbox, and strings that end a reply. Made by `find_template`. `tool_use`: the
    template for chats with tools, when the model has one of their own."""

    name: str
    source: str
    stop: tuple[str, ...] = ()
    tool_use: str | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        vocab: Vocab,
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The text of a chat, as the transformers library makes it; by default up to the place where a reply begins.

        messages   with `role` and `content`, and other members that the template reads (`tool_calls`,
                   `reasoning_content` ...)
        tools      tools in OpenAI's form
        documents  documents for retrieval, with `title` and `text`
        variables  variables of the template: `enable_thinking`, `builtin_tools` ...; they hide others of the same name

        Raises ModelError when the template cannot be read or refuses the messages, and for values that are not JSON's.
        """
        from .jinja import plain, render  # who makes no chats does not wait for Jinja

        if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(f"messages must be a list of dicts with role and content, not {messages!r:.60}")
        source = self.source if not tools or self.tool_use is None else self.tool_use
        values = {
            **_special_tokens(vocab),
            "messages": plain("messages", [_with_reasoning(m) for m in messages]),
            "tools": plain("tools", tools),
            "documents": plain("documents", documents),
            "add_generation_prompt": add_generation_prompt,
            **plain("variables", variables),
        }
        return render(self.name, source, values)


def _special_tokens(vocab: Vocab) -> dict[str, str]:
    """The variables `bos_token`, `eos_token` and so on. bos and eos are empty texts when the vocabulary has none,
    because templates use them without asking."""
    ids = {role: getattr(vocab, role) for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
    texts = {f"{role}_token": vocab.text(i) for role, i in ids.items() if i is not None}
    return {"bos_token": "", "eos_token": ""} | texts


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose reasoning, by whichever name it came, has those that templates read."""
    found = next((message[k] for k in _REASONING if message.get(k) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def find_template(name: str | None, kv: Mapping[str, Any]) -> ChatTemplate:
    """The chat template `name`: one of llama.cpp's names, Jinja itself, or a file that holds it; None: the template of
    the model's metadata, or chatml when it has none. Raises ModelError for any other name."""
    from .named_templates import TEMPLATES

    if name is None:
        source = kv.get("tokenizer.chat_template")
        if isinstance(source, str):
            tool_use = kv.get("tokenizer.chat_template.tool_use")
            return ChatTemplate("of the model", source, tool_use=tool_use if isinstance(tool_use, str) else None)
        name = "chatml"
    if name in TEMPLATES:
        return ChatTemplate(name, TEMPLATES[name].source, TEMPLATES[name].stop)
    if "{{" in name or "{%" in name:
        return ChatTemplate("that was given", name)
    if not os.path.exists(name):
        known = ", ".join(TEMPLATES)
        raise ModelError(f"unknown chat template {name!r}: there is no such file, and known are: {known}")
    return ChatTemplate(name, read_text(name, limits.TEXT_FILE_BYTES, ModelError))
