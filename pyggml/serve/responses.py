"""OpenAI's /v1/responses. A request becomes a chat; nothing is stored between requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from pyggml.llm.openai.chat import ChatAnswer
from pyggml.llm.openai.request import new_id, now

from .engine_thread import Answering
from .errors import HTTPError
from .http import Json, event
from .long_json import size
from .openai import begin_chat, counted, whole_chat
from .schemas import ChatBody, Sampled
from .service import Service, service_of

_SHOWN = 1 << 17  # characters and parts of what answers repeat


class ResponsesBody(Sampled):
    """/v1/responses. Other options of samplers than OpenAI's are taken, too."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None


async def responses(request: Request) -> Response:
    """POST /v1/responses."""
    service = service_of(request)
    body = await service.read(request, ResponsesBody.model_validate)
    chat = await service.prepared(lambda: _chat(body))
    answering, (answer,) = await begin_chat(service, chat)
    shown = _Response(service, body, answering)
    if body.stream:
        events = _events(shown, answering, answer)
        return service.stream(answering, events, lambda e: event({"type": "error", **e.json["error"]}, "error"))
    whole = await service.answered(request, answering, whole_chat(service, answering, [answer]))
    message = whole["choices"][0]["message"]
    return Json(shown.json(_Items().all(message), whole["choices"][0]["finish_reason"]))


async def input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens."""
    service = service_of(request)
    body = await service.read(request, ResponsesBody.model_validate)
    return Json(await counted(service, await service.prepared(lambda: _chat(body))))


# -- requests ---------------------------------------------------------------------------------------------------------


def _chat(body: ResponsesBody) -> ChatBody:
    """The same request as a chat."""
    if body.previous_response_id is not None:
        raise HTTPError(501, "previous_response_id: responses are not stored here; send the conversation as input")
    if body.input is None:
        raise HTTPError(400, '"input" is required')
    given: list[dict[str, Any]] = [] if body.instructions is None else [_said("system", body.instructions)]
    if isinstance(body.input, str):
        given.append(_said("user", body.input))
    else:
        for i, item in enumerate(body.input):
            _add(given, item, i)
    chat: dict[str, Any] = {k: v for k, v in body.given.items() if k in Sampled.model_fields}
    chat |= {"messages": given, "max_tokens": body.max_output_tokens, "tool_choice": _choice(body.tool_choice)}
    if body.tools is not None:
        chat["tools"] = [_tool(t) for t in body.tools]
    chat["parallel_tool_calls"] = body.parallel_tool_calls
    form: Any = (body.text or {}).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":  # pyright: ignore[reportUnknownMemberType]
        chat["response_format"] = {"type": "json_schema", "json_schema": form}
    elif isinstance(form, dict):
        chat["response_format"] = form
    if isinstance(effort := (body.reasoning or {}).get("effort"), str):
        chat["reasoning_effort"] = effort
    return ChatBody.model_validate(chat)


def _said(role: str, text: Any) -> dict[str, Any]:
    return {"role": role, "content": text}


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], i: int) -> None:
    """Put an item of the input behind the messages. Calls that follow one another are of one message."""
    match item.get("type", "message"):
        case "message":
            messages.append(_said(str(item.get("role")), _content(item.get("content"), i)))
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({**_said("assistant", ""), "tool_calls": [call]})
        case "function_call_output":
            output = _content(item.get("output"), i)
            messages.append({**_said("tool", output), "tool_call_id": item.get("call_id")})
        case "reasoning":
            pass
        case kind:
            raise HTTPError(400, f"input[{i}]: an item of type {kind!r:.60} is not supported")


def _content(given: Any, i: int) -> Any:
    """The content of an item as that of a chat's message: text, or parts."""
    if not isinstance(given, list):
        return given
    parts: list[dict[str, Any]] = []
    for part in cast("list[Any]", given):
        match part:
            case {"type": "input_text" | "output_text" | "text", "text": str() as text}:
                parts.append({"type": "text", "text": text})
            case {"type": "refusal", "refusal": str() as text}:
                parts.append({"type": "text", "text": text})
            case {"type": "input_image", "image_url": str() as url}:
                parts.append({"type": "image_url", "image_url": {"url": url}})
            case {"type": "input_image"}:
                raise HTTPError(400, f"input[{i}]: an input_image has an image_url; files are not stored here")
            case {"type": "input_audio", "input_audio": sound}:
                parts.append({"type": "input_audio", "input_audio": sound})
            case {"type": kind}:
                raise HTTPError(400, f"input[{i}]: a part of type {kind!r:.60} is refused")
            case _:
                raise HTTPError(400, f"input[{i}]: content is text, or a list of parts with their types")
    return parts


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise HTTPError(400, f"tools: a tool of type {tool.get('type')!r:.60} is not supported, only functions are")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


# -- answers ----------------------------------------------------------------------------------------------------------


def _shown(given: Any) -> Any:
    """What an answer, and up to three events of a stream, repeat of a request; None when it is long."""
    return None if size(given, _SHOWN) > _SHOWN else given


class _Response:
    """The response object, at any time."""

    def __init__(self, service: Service, body: ResponsesBody, answering: Answering) -> None:
        (self._g,) = answering.generations
        self._head: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": now(),
            "model": service.name,
            "instructions": _shown(body.instructions),
            "tools": _shown(body.tools or []),
            "tool_choice": _shown(body.tool_choice or "auto"),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": self._g.chain.params.temp,
            "top_p": self._g.chain.params.top_p,
            "error": None,
            "metadata": {},
        }

    def json(self, output: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        """The object; `reason`: why the answer ended, None while it is under way."""
        g = self._g
        cut = reason == "length"
        shown = {**self._head, "output": output, "incomplete_details": {"reason": "max_output_tokens"} if cut else None}
        if reason is None:
            return {**shown, "status": "in_progress", "usage": None}
        usage = {
            "input_tokens": g.n_prompt,
            "input_tokens_details": {"cached_tokens": g.n_past},
            "output_tokens": len(g.ids),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": g.n_prompt + len(g.ids),
        }
        return {**shown, "status": "incomplete" if cut else "completed", "completed_at": now(), "usage": usage}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class _Items:
    """The items of an output, made of the parts of a reply, with the events of a stream."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False
        self._text = ""

    def all(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The items of a whole message."""
        self.of(message)
        self.closed()
        return self.items

    def of(self, delta: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The events for a part of a reply."""
        events: list[dict[str, Any]] = []
        if thought := delta.get("reasoning_content"):
            if not self._is_open("reasoning"):
                events += [*self.closed(), self._added({"type": "reasoning", "id": new_id("rs"), "summary": []})]
            self._text += thought
            events.append(self._event("response.reasoning_text.delta", content_index=0, delta=thought))
        if text := delta.get("content"):
            if not self._is_open("message"):
                item: dict[str, Any] = {"type": "message", "id": new_id("msg"), "role": "assistant", "content": []}
                events += [*self.closed(), self._added(item)]
                events.append(self._event("response.content_part.added", content_index=0, part=_part("")))
            self._text += text
            events.append(self._event("response.output_text.delta", content_index=0, delta=text, logprobs=[]))
        for call in delta.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            if "id" in call:
                item = {"type": "function_call", "id": new_id("fc"), "call_id": call["id"], "arguments": ""}
                item["name"] = call["function"]["name"]
                events += [*self.closed(), self._added(item)]
            self._text += arguments
            events.append(self._event("response.function_call_arguments.delta", delta=arguments))
        return events

    def closed(self) -> list[dict[str, Any]]:
        """The events that end the item that is open."""
        if not self._open:
            return []
        item, text, events = self.items[-1], self._text, list[dict[str, Any]]()
        match item["type"]:
            case "message":
                item["content"] = [_part(text)]
                events.append(self._event("response.output_text.done", content_index=0, text=text, logprobs=[]))
                events.append(self._event("response.content_part.done", content_index=0, part=_part(text)))
            case "reasoning":
                item["content"] = [{"type": "reasoning_text", "text": text}]
                events.append(self._event("response.reasoning_text.done", content_index=0, text=text))
            case _:
                item["arguments"] = text
                done = {"name": item["name"], "arguments": text}
                events.append(self._event("response.function_call_arguments.done", **done))
        item["status"] = "completed"
        self._open, self._text = False, ""
        done = {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        return [*events, done]

    def _is_open(self, kind: str) -> bool:
        return self._open and self.items[-1]["type"] == kind

    def _added(self, item: dict[str, Any]) -> dict[str, Any]:
        self.items.append({**item, "status": "in_progress"})
        self._open = True
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": {**self.items[-1]}}

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}


async def _events(shown: _Response, answering: Answering, answer: ChatAnswer) -> AsyncIterator[bytes]:
    n = 0

    def numbered(data: dict[str, Any]) -> bytes:
        nonlocal n
        n += 1
        return event({**data, "sequence_number": n - 1}, data["type"])

    items, reason = _Items(), None
    for kind in ("response.created", "response.in_progress"):
        yield numbered({"type": kind, "response": shown.json([], None)})
    async for _, token in answering:
        for part in answer.parts(token):
            for data in items.of(cast("Mapping[str, Any]", part["choices"][0]["delta"])):
                yield numbered(data)
            reason = part["choices"][0]["finish_reason"]
    for data in items.closed():
        yield numbered(data)
    last = "response.incomplete" if reason == "length" else "response.completed"
    yield numbered({"type": last, "response": shown.json(items.items, reason or "stop")})
