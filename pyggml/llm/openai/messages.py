"""Messages as OpenAI has them, made what templates were written for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pyggml.errors import ModelError

from ..generate.templates import ChatTemplate, check_message
from ..vocab import Vocab
from .abilities import takes_objects, takes_parts
from .formats import Dialect

_MEDIA = ("image", "audio")  # types of parts that are no text
_ROLES = {"developer": "system", "function": "tool"}


def prompt_of(
    template: ChatTemplate,
    vocab: Vocab,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    add_generation_prompt: bool = True,
) -> str:
    """The text of a chat, by default up to the place where a reply begins. Where a template says nothing of tools, a
    system message does."""
    if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"messages must be a list of dicts with role and content, not {messages!r:.60}")
    own = {"messages", "vocab", "tools", "self", "add_generation_prompt"}
    if not isinstance(variables, Mapping) or own & set(variables):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"chat_template_kwargs must be a dict without {', '.join(sorted(own))}")
    calls = any(m.get("tool_calls") for m in messages)
    objects = calls and takes_objects(template, vocab)
    contents = [cast("Sequence[Any]", c) for m in messages if isinstance(c := m.get("content"), (list, tuple))]
    several = any(len(parts) > 1 for parts in contents)
    between = "\n" if several and not takes_parts(template, vocab) else ""
    plain = [_message(m, i, objects, between) for i, m in enumerate(messages)]

    def render(plain: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> str:
        return template.render(plain, vocab, add_generation_prompt, tools=tools, **variables)

    text = render(plain, tools or None)
    if tools and not isinstance(template, Dialect) and text == render(plain, None):
        first = plain[0]["content"] if plain and plain[0]["role"] == "system" else ""
        if not isinstance(first, str):
            raise ModelError("a system message with pictures cannot tell of tools")
        told = {"role": "system", "content": f"{first}\n\n{_described(tools)}".lstrip()}
        rest = plain[1:] if first else plain
        text = render([told, *map(_spelled_out, rest)], None)
    return text


def _message(message: Mapping[str, Any], i: int, objects: bool, between: str) -> dict[str, Any]:
    out = dict(message)
    check_message(out, i)
    out["role"] = _ROLES.get(out["role"], out["role"])
    out["content"] = _content(out.get("content"), i, between)
    if not isinstance(out.get("tool_calls", ()), Sequence | None):
        raise ModelError(f"messages[{i}].tool_calls must be a list, not {out['tool_calls']!r:.60}")
    if out.get("tool_calls"):
        out["tool_calls"] = [_call(c, f"messages[{i}].tool_calls", objects) for c in out["tool_calls"]]
    return out


def has_media(messages: Any) -> bool:
    """Whether parts of messages are pictures or sounds: {"type": "image", "image": ...}, {"type": "audio", ...}."""
    if not isinstance(messages, Sequence):
        return False
    known = [cast("Mapping[str, Any]", m) for m in cast("Sequence[Any]", messages) if isinstance(m, Mapping)]
    contents: list[Any] = [m.get("content") for m in known]
    parts = [p for content in contents if isinstance(content, (list, tuple)) for p in cast("Sequence[Any]", content)]
    return any(isinstance(p, Mapping) and cast("Mapping[str, Any]", p).get("type") in _MEDIA for p in parts)


def _content(content: Any, i: int, between: str) -> str | list[Any]:
    """Content as one text, or with a picture or sound as its parts."""
    if has_media([{"content": content}]):
        return list(cast("Sequence[Any]", content))
    return text_of(content, i, between)


def text_of(content: Any, i: int, between: str = "") -> str:
    """The content of the message `i` as one text, its parts joined by `between`. Raises ModelError for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = cast("Sequence[Any]", content if isinstance(content, Sequence) else [content])
    texts = [cast("Mapping[str, Any]", p).get("text") if isinstance(p, Mapping) else p for p in parts]
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(text, str):
            kind = cast("Mapping[str, Any]", part).get("type") if isinstance(part, Mapping) else None
            what = f": a part of type {kind!r:.40} is refused, the model reads text" * (kind not in (None, "text"))
            raise ModelError(f"messages[{i}]: content must be text, or a list of parts of type text{what}")
    return between.join(cast("list[str]", texts))


def _call(call: Any, where: str, objects: bool) -> dict[str, Any]:
    function = cast(Any, call.get("function") if isinstance(call, Mapping) else None)
    if not isinstance(function, Mapping):
        raise ModelError(f"{where}: a call must have a function with name and arguments")
    known = dict(cast("Mapping[str, Any]", function))
    arguments: Any = known.get("arguments", {})
    if objects and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except ValueError:
            raise ModelError(f"{where}: the arguments are no JSON: {arguments!r:.60}") from None
    elif not objects and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**known, "arguments": arguments}}


def _described(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text that explains tools to a model that was not trained with them."""
    lines = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    form = '{"name": "the function", "arguments": {"parameter": "value"}}'
    return "\n".join(
        ["You can call these functions:", *lines, f"To call one, reply with nothing but JSON of this form: {form}"]
    )


def _spelled_out(message: dict[str, Any]) -> dict[str, Any]:
    """A message with calls, or with a result, for a template that knows of neither."""
    if message.get("tool_calls"):
        calls = [c["function"] for c in message["tool_calls"]]
        return {"role": "assistant", "content": message["content"] + "\n".join(json.dumps(c) for c in calls)}
    if message["role"] == "tool" and isinstance(message["content"], str):
        return {"role": "user", "content": f"The function's result: {message['content']}"}
    return message
