"""Anthropic's endpoints: /v1/messages and /v1/messages/count_tokens. Their requests become chats."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from pyggml.llm.generate.generation import Generation
from pyggml.llm.openai.chat import ChatAnswer
from pyggml.llm.openai.request import new_id

from .engine_thread import Answering
from .errors import HTTPError
from .http import Json, event
from .openai import begin_chat, chat_of, whole_chat
from .schemas import ChatBody, Sampled
from .service import Service, service_of

_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class MessagesBody(Sampled):
    """/v1/messages. Other options of samplers than Anthropic's are taken, too."""

    model: str | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


def error_response(e: HTTPError) -> Response:
    """An error in Anthropic's shape."""
    return Json(_error(e), e.code, e.headers)


def _error(e: HTTPError) -> dict[str, Any]:
    return {"type": "error", "error": {"type": _ERRORS.get(e.code, "api_error"), "message": e.message}}


async def messages(request: Request) -> Response:
    """POST /v1/messages."""
    service = service_of(request)
    body = await service.read(request, MessagesBody.model_validate)
    if body.max_tokens is None:
        raise HTTPError(400, "max_tokens: Field required")
    chat = await service.prepared(lambda: _chat(body))
    answering, (answer,) = await begin_chat(service, chat)
    if body.stream:
        events = _events(service, body, answering, answer)
        return service.stream(answering, events, lambda e: event(_error(e), "error"))
    whole = await service.answered(request, answering, whole_chat(service, answering, [answer]))
    (g,) = answering.generations
    choice = whole["choices"][0]
    return Json(
        {
            **_head(service),
            "content": _content(choice["message"]),
            **_end(g, choice["finish_reason"], body.stop_sequences),
            "usage": {**_input(g), "output_tokens": len(g.ids)},
        }
    )


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    service = service_of(request)
    body = await service.read(request, MessagesBody.model_validate)
    return Json({"input_tokens": len(await service.prepared(lambda: chat_of(service, _chat(body)).ids))})


# -- requests ---------------------------------------------------------------------------------------------------------


def _chat(body: MessagesBody) -> ChatBody:
    """The same request as a chat."""
    given: list[dict[str, Any]] = []
    if body.system:
        given.append({"role": "system", "content": body.system})
    for i, message in enumerate(body.messages):
        given += _messages(message, i)
    chat: dict[str, Any] = {k: v for k, v in body.given.items() if k in Sampled.model_fields}
    chat |= {"messages": given, "max_tokens": body.max_tokens, "stop": body.stop_sequences}
    if body.tools is not None:
        chat["tools"] = [_tool(t) for t in body.tools]
    if body.tool_choice is not None:
        chat["tool_choice"] = _choice(body.tool_choice)
        chat["parallel_tool_calls"] = not body.tool_choice.get("disable_parallel_tool_use")
    if body.thinking is not None:
        chat["chat_template_kwargs"] = {"enable_thinking": body.thinking.get("type") != "disabled"}
        chat["thinking_budget_tokens"] = body.thinking.get("budget_tokens")
    return ChatBody.model_validate(chat)


def _messages(message: Mapping[str, Any], i: int) -> list[dict[str, Any]]:
    """A message as messages of a chat: results of tools have messages of their own there."""
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": message.get("role"), "content": content}]
    if not isinstance(content, list):
        raise HTTPError(400, f"messages.{i}.content: text, or a list of blocks")
    results: list[dict[str, Any]] = []
    out: dict[str, Any] = {"role": message.get("role")}
    calls: list[dict[str, Any]] = []
    before: list[dict[str, Any]] = []  # parts up to the last picture
    texts: list[str] = []  # behind it
    for block in cast("list[Any]", content):
        if not isinstance(block, dict):
            raise HTTPError(400, f"messages.{i}.content: a block must be an object")
        block = cast("dict[str, Any]", block)
        match block.get("type"):
            case "text":
                texts.append(_text(block.get("text"), i))
            case "thinking":
                out["reasoning_content"] = _text(block.get("thinking"), i)
            case "redacted_thinking":
                pass
            case "image":
                before += [*_part(texts), _image(block.get("source"), i)]
                texts = []
            case "tool_use":
                function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case "tool_result":
                text = _result(block.get("content"), i)
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
            case kind:
                raise HTTPError(400, f"messages.{i}.content: a block of type {kind!r:.60} is not supported")
    out["content"] = [*before, *_part(texts)] if before else "".join(texts)
    if calls:
        out["tool_calls"] = calls
    return [*results, *([out] if out["content"] or calls or not results else [])]


def _part(texts: Sequence[str]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if (text := "".join(texts)) else []


def _image(source: Any, i: int) -> dict[str, Any]:
    """A picture as a part of a chat."""
    match source:
        case {"type": "base64", "data": str() as data}:
            url = f"data:{source.get('media_type', 'image/png')};base64,{data}"
        case {"type": "url", "url": str() as url}:
            pass
        case _:
            raise HTTPError(400, f"messages.{i}.content: the source of an image is base64 with data, or a url")
    return {"type": "image_url", "image_url": {"url": url}}


def _text(given: Any, i: int) -> str:
    if not isinstance(given, str):
        raise HTTPError(400, f"messages.{i}.content: a text is missing")
    return given


def _result(content: Any, i: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    blocks = cast("list[Any]", content if isinstance(content, list) else [content])
    texts = [cast("Mapping[str, Any]", b).get("text") if isinstance(b, Mapping) else None for b in blocks]
    return "".join(_text(t, i) for t in texts)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    return {"type": "function", "function": {**function, "description": tool.get("description", "")}}


def _choice(choice: Mapping[str, Any]) -> Any:
    match choice.get("type"):
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
        case "auto" | "none":
            return choice["type"]
        case kind:
            raise HTTPError(400, f"tool_choice.type: auto, any, tool or none, not {kind!r:.60}")


# -- answers ----------------------------------------------------------------------------------------------------------


def _head(service: Service) -> dict[str, Any]:
    return {"id": new_id("msg"), "type": "message", "role": "assistant", "model": service.name}


def _input(g: Generation) -> dict[str, int]:
    return {"cache_read_input_tokens": g.n_past, "input_tokens": g.n_prompt - g.n_past}


def _end(g: Generation, reason: str | None, asked: Sequence[str] | None) -> dict[str, Any]:
    """Why the answer ended. A stop string of the chat template is no stop sequence that was asked for."""
    word = g.stop_string if g.stop_string in (asked or ()) else None
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    return {"stop_reason": reasons.get(str(reason), "stop_sequence" if word else "end_turn"), "stop_sequence": word}


def _content(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    return [*blocks, *(_use(call, True) for call in message.get("tool_calls", ()))]


def _use(call: Mapping[str, Any], whole: bool) -> dict[str, Any]:
    function = call["function"]
    given: Any = {}
    with suppress(ValueError, RecursionError):
        given = json.loads(function["arguments"]) if whole else given
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": given}


async def _events(
    service: Service, body: MessagesBody, answering: Answering, answer: ChatAnswer
) -> AsyncIterator[bytes]:
    (g,) = answering.generations
    blocks = _Blocks()
    started = False
    async for _, token in answering:
        if not started:
            message: dict[str, Any] = {**_head(service), "content": [], "stop_reason": None, "stop_sequence": None}
            message["usage"] = {**_input(g), "output_tokens": 0}
            yield event({"type": "message_start", "message": message}, "message_start")
            started = True
        for part in answer.parts(token):
            choice = part["choices"][0]
            for name, data in blocks.of(cast("Mapping[str, Any]", choice["delta"])):
                yield event({"type": name, **data}, name)
            if (reason := choice["finish_reason"]) is not None:
                for name, data in blocks.closed():
                    yield event({"type": name, **data}, name)
                delta = {"delta": _end(g, reason, body.stop_sequences), "usage": {"output_tokens": len(g.ids)}}
                yield event({"type": "message_delta", **delta}, "message_delta")
                yield event({"type": "message_stop"}, "message_stop")


_Event = tuple[str, dict[str, Any]]


class _Blocks:
    """The blocks of a message that is streamed: one is open at a time."""

    def __init__(self) -> None:
        self._kind, self._index = "", -1

    def of(self, delta: Mapping[str, Any]) -> list[_Event]:
        """The events for a part of a reply."""
        events: list[_Event] = []
        if thought := delta.get("reasoning_content"):
            events += self._opened("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": thought}))
        if text := delta.get("content"):
            events += self._opened("text", {"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": text}))
        calls: Sequence[Mapping[str, Any]] = delta.get("tool_calls", ())
        for call in calls:
            if "id" in call:
                events += self._opened("tool_use", _use(call, False), anew=True)
            events.append(self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]}))
        return events

    def closed(self) -> list[_Event]:
        """The events that close the block that is open."""
        if not self._kind:
            return []
        signed = [self._delta({"type": "signature_delta", "signature": ""})] if self._kind == "thinking" else []
        self._kind = ""
        return [*signed, ("content_block_stop", {"index": self._index})]

    def _opened(self, kind: str, block: dict[str, Any], anew: bool = False) -> list[_Event]:
        if kind == self._kind and not anew:
            return []
        events = self.closed()
        self._kind, self._index = kind, self._index + 1
        return [*events, ("content_block_start", {"index": self._index, "content_block": block})]

    def _delta(self, delta: dict[str, Any]) -> _Event:
        return "content_block_delta", {"index": self._index, "delta": delta}
