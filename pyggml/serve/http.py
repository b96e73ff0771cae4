"""Between ASGI and the endpoints: bodies within their limits, JSON, streams of events, and clients that leave."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from time import monotonic
from typing import Any, NoReturn, TypeVar

from anyio import fail_after
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyggml import limits
from pyggml.json_text import json_text

from .errors import HTTPError, of_generation
from .turns import LENGTH, SHORT

T = TypeVar("T")
_READ = "pyggml.json"  # in the scope of a request: its body, which a router has read


def dumps(value: Any) -> bytes:
    """JSON as UTF-8, as llama-server writes it: with null for numbers that are not finite. Lone surrogates of a request
    become question marks."""
    return json_text(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class Json(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return dumps(content)


def error_response(e: HTTPError) -> Response:
    """An error as an answer."""
    return Json(e.json, e.code, e.headers)


async def body_of(request: Request, timeout: float, most: int, paced: bool = True) -> bytes:
    """The body of a request. Raises HTTPError for one that has more than `most` bytes, or says so; that comes too
    slowly: when no part comes for `timeout` seconds, and, if it is `paced`, when the whole takes longer than
    limits.BODY_SECONDS and BODY_RATE allow; or when the bodies that are coming are too long together, and it has more
    than its share of what they may be: who waits with a long one in hand keeps nobody else out."""
    parts, size, begun, state = list[bytes](), 0, monotonic(), request.app.state
    said = request.headers.get("content-length", "")
    if len(said) > 20 or (said.isdecimal() and int(said) > most):
        raise _too_large(most)
    state.n_bodies += 1
    try:
        while True:
            left = begun + limits.BODY_SECONDS + size / limits.BODY_RATE - monotonic() if paced else timeout
            try:
                with fail_after(min(timeout, left)):
                    message = await request.receive()
            except TimeoutError:
                raise HTTPError(408, f"the request comes too slowly: {size} bytes of its body so far") from None
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            state.n_coming += len(parts[-1])
            if size > most:
                raise _too_large(most)
            if not message.get("more_body", False):
                return b"".join(parts)
            if state.n_coming > limits.BODIES_BYTES and size > limits.BODIES_BYTES // state.n_bodies:
                raise HTTPError(503, "too many long requests are coming at once: try again later")
    finally:
        state.n_bodies -= 1
        state.n_coming -= size


def _too_large(most: int) -> HTTPError:
    return HTTPError(413, f"the request is longer than {most} bytes")


async def json_body(request: Request, timeout: float) -> Any:
    """The body of a request, read as JSON. Raises HTTPError as `body_of`, and for what is no JSON."""
    if _READ in request.scope:
        return request.scope[_READ]
    body, state = await body_of(request, timeout, limits.REQUEST_BYTES), request.app.state
    LENGTH.set(len(body))
    if len(body) < SHORT:
        return _read(request, body)
    state.n_bodies += 1  # it counts as one that is coming: very many may be complete at once
    state.n_coming += len(body)
    try:
        while (left := state.read_at - monotonic()) > 0:
            await asyncio.sleep(left)
        begun = monotonic()
        try:
            return _read(request, body)
        finally:  # all others have as long for themselves before the next one is read
            state.read_at = 2 * monotonic() - begun
    finally:
        state.n_bodies -= 1
        state.n_coming -= len(body)


def _read(request: Request, body: bytes) -> Any:
    """See `json_body`."""
    if is_dense(body):
        raise HTTPError(413, f"the request has more than {limits.REQUEST_PARTS} brackets and colons")
    try:
        return read_json(body)
    except UnicodeDecodeError as e:
        if coded := request.headers.get("content-encoding"):
            raise HTTPError(415, f"Content-Encoding {coded:.40}: send the request as it is") from None
        raise HTTPError(400, f"the request is not UTF-8: {e.reason} at byte {e.start}") from None
    except RecursionError:
        raise HTTPError(400, "the request is nested too deep") from None
    except ValueError as e:
        raise HTTPError(400, f"the request is no JSON: {e}") from None


def is_dense(text: bytes) -> bool:
    """Whether JSON may have so many lists, objects and members that nobody else has a turn while it is read. Brackets
    and colons in its texts count, too."""
    return sum(map(text.count, (b"[", b"{", b":"))) > limits.REQUEST_PARTS


def read_json(text: bytes) -> Any:
    """What a text in JSON says. Garbage is not collected meanwhile: searching all lists made so far, again and again,
    would take longer than reading them. Raises ValueError for what is no JSON, RecursionError for what is nested too
    deep."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return json.loads(text.decode("utf-8-sig"), parse_constant=_no_number)
    finally:
        if was_on:
            gc.enable()


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def with_body(scope: Scope, body: Any) -> Scope:
    """The scope of a request whose body has been read already: twice would take twice as long."""
    return {**scope, _READ: body}


async def json_object(request: Request, timeout: float) -> dict[str, Any]:
    """The body of a request, which must be a JSON object."""
    body = await json_body(request, timeout)
    if not isinstance(body, dict):
        raise HTTPError(400, f"the request must be a JSON object, not {type(body).__name__}")
    return body  # pyright: ignore[reportUnknownVariableType]


async def until_gone(request: Request, answer: Awaitable[T]) -> T:
    """An answer whose work ends when the client leaves. Raises ClientDisconnect then."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        await _cancelled(work, gone)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, as `events` gives them. They end when the client has left, or takes nothing for `timeout`
    seconds; `close` is called when they end in any way. When nothing was sent for `ping` seconds (if positive), a
    comment is. `failed` makes the event of an error. The head of the answer leaves with the first event."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        ping: float,
        timeout: float,
        failed: Callable[[HTTPError], bytes],
    ) -> None:
        super().__init__(None, 200, None, "text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-store"
        self._events, self._close, self._failed = events, close, failed
        self._ping, self._timeout = ping, timeout
        self._last, self._is_sending = monotonic(), False  # when a part was sent, and whether it is still under way
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        tasks: list[asyncio.Future[None]] = []
        try:
            work = (self._write(send), _gone(receive), self._watch(send))
            tasks = [asyncio.ensure_future(w) for w in work]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            await _cancelled(*tasks)

    async def _write(self, send: Send) -> None:
        try:
            async for event in self._events:
                await self._send(send, event)
        except OSError:  # the client has left
            return
        except Exception as e:
            await self._send(send, self._failed(of_generation(e)))
        await self._send(send, b"", False)

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        self._last, self._is_sending = monotonic(), True
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._is_sending = False

    async def _watch(self, send: Send) -> None:
        """Ends when the client has taken nothing for too long; shows life while there is nothing to send."""
        period = min(self._ping, self._timeout) if self._ping > 0 else self._timeout
        while True:
            await asyncio.sleep(max(self._last + period - monotonic(), 0.01))
            silent = monotonic() - self._last
            if self._is_sending and silent >= self._timeout:
                return
            if not self._is_sending and 0 < self._ping <= silent:
                await self._send(send, b":\n\n")
            elif silent >= period:  # a part is under way
                await asyncio.sleep(period)


def event(value: Any, name: str | None = None) -> bytes:
    """An event with JSON as its data."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + dumps(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"  # the last event of OpenAI's streams
