"""The connection of a client: how long it may take to ask and to read, and how many connections there may be; and the
server that looks after them until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from time import monotonic
from types import FrameType
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle

from pyggml import limits
from pyggml.system.files import open_files

from .errors import HTTPError, stopping
from .http import dumps, error_response

_LINGER = 2.0  # seconds in which the rest of a refused request is read, so that the client sees the answer
_IDLE = 1.0  # seconds without a request after which a connection may make room for another one
_HALF = 1.0  # seconds for the answer to a client that says it will send no more: most such clients have left, few wait
_HEAD = 1 << 16  # bytes of a request's head


class _Wire(h11.Connection):
    """h11's reading of requests, which refuses four kinds besides. A length and chunks at once: a proxy in front may
    end the request elsewhere, and take what follows for another client's. HTTP versions other than 1.x. Very many
    headers, which are looked through again and again. And bodies of very many chunks of a few bytes, each of which
    costs as much as a long one."""

    method = b""  # of the last request
    n_chunks = n_bytes = 0  # of its body so far

    def next_event(self) -> Any:
        """What has come next."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.method, self.n_chunks, self.n_bytes = event.method, 0, 0
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
            if len(event.headers) > limits.HEADERS:
                raise h11.RemoteProtocolError(f"more than {limits.HEADERS} headers", error_status_hint=431)
            if not event.http_version.startswith(b"1."):
                version = event.http_version.decode("ascii")
                raise h11.RemoteProtocolError(f"version {version} instead of 1.1", error_status_hint=505)
        elif isinstance(event, h11.Data):
            self.n_chunks, self.n_bytes = self.n_chunks + event.chunk_end, self.n_bytes + len(event.data)
            if self.n_chunks > limits.CHUNKS and self.n_bytes < limits.CHUNK_BYTES * self.n_chunks:
                raise h11.RemoteProtocolError(f"{self.n_chunks} chunks of fewer than {limits.CHUNK_BYTES} bytes")
        return event


class _Gathering:
    """A transport whose writes of one turn of the event loop leave together: a call of `send` takes as long as making
    several events of a stream, and an answer has a head, events and an end."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._loop = transport, asyncio.get_running_loop()
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def write_eof(self) -> None:
        self._send()
        self._transport.write_eof()

    def close(self) -> None:
        self._send()
        self._transport.close()

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(b"".join(parts))


class Connection(H11Protocol):
    """uvicorn's connection, with limits: `check` is to be called about once a second, from the event loop.

    When there are more than `room()` connections, the one that has been without a request for longest ends; if there
    is none, the new one is answered 503. What is no HTTP, and what comes too slowly, is answered by an error in the
    server's shape.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Wire(h11.SERVER, _HEAD)
        self._refused = self._half_closed = False
        self._idle_since = self._since = monotonic()  # without a request; in what `_waits` says
        self._waits = True  # for the rest of a request's head; or, when it is refused, for the client to leave
        self._left, self._left_since = 0, 0.0  # bytes that the client has not taken, and since when so many

    def connection_made(self, transport: Any) -> None:
        """Take the client in, if there is room."""
        super().connection_made(cast(asyncio.Transport, _Gathering(transport)))
        if len(self.connections) <= room():
            return
        here = [c for c in self.connections if isinstance(c, Connection) and not c.transport.is_closing()]
        if len(here) > 2 * room():  # most of them are refused, and do not leave
            transport.abort()
        elif len(here) > room():
            now = monotonic()
            idle = [c for c in here if c.is_idle and now - c._idle_since >= _IDLE]
            if idle:
                min(idle, key=Connection._since_when).transport.abort()
            else:
                self._refuse(HTTPError(503, f"there are {room()} connections: try again later"))

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return not self._refused and (self._asked is None or self._asked.response_complete)

    @property
    def _asked(self) -> RequestResponseCycle | None:
        """The last request. (uvicorn does not tell type checkers that there may be none yet.)"""
        return cast("RequestResponseCycle | None", self.cycle)

    def _since_when(self) -> float:
        return self._idle_since

    def data_received(self, data: bytes) -> None:
        """A part of a request."""
        if self._refused:
            return
        super().data_received(data)
        if self._refused:
            return
        waits = self.conn.their_state is h11.IDLE  # the head of a request is not complete
        if waits and not self._waits:
            self._since = monotonic()
        self._waits = waits

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]  (asyncio's protocol may)
        """The client sends no more. Returns whether the connection stays open for a while: for an answer under way."""
        is_over = self.is_idle or self._refused or self.conn.their_state is h11.SEND_BODY
        if is_over or self.scheme == "https":  # TLS cannot be half open
            self.transport.close()  # what was written in this turn of the event loop leaves first
            return False
        self._half_closed = True
        self.loop.call_later(_HALF, self._end_half)
        return True

    def _end_half(self) -> None:
        if not self.transport.is_closing():  # else the answer is complete, and leaves as fast as the client takes it
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """The answer to what is no HTTP (called while that error is handled)."""
        e = sys.exc_info()[1]
        self._refuse(HTTPError(getattr(e, "error_status_hint", 400), f"the request is no HTTP: {e}"))

    def on_response_complete(self) -> None:
        """An answer has been given."""
        super().on_response_complete()
        self._idle_since = monotonic()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._leave()  # the rest of the request interests nobody
        elif self._half_closed and self.is_idle:
            self.transport.close()

    def check(self, now: float, timeout: float) -> None:
        """End what takes too long. `timeout`: seconds in which a client must take something of an answer."""
        left = self.transport.get_write_buffer_size()
        if left != self._left:
            self._left, self._left_since = left, now
        if (left and now - self._left_since >= timeout) or (self._refused and now - self._since >= _LINGER):
            self.transport.abort()
        elif self._waits and not self._refused and now - self._since >= limits.HEADER_SECONDS:
            self._refuse(HTTPError(408, f"the headers did not come in {limits.HEADER_SECONDS:g} seconds"))

    def _refuse(self, e: HTTPError) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()  # in the middle of an answer
            return
        body = dumps(e.json)
        headers = {"Content-Type": "application/json", "Content-Length": f"{len(body)}", "Connection": "close"}
        reason = STATUS_PHRASES.get(e.code, b"")
        start = h11.Response(status_code=e.code, headers=[*(headers | e.headers).items()], reason=reason)
        is_head = self.conn.our_state is h11.SEND_RESPONSE and self.conn.method == b"HEAD"
        for event in (start, h11.Data(data=b"" if is_head else body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._leave()

    def _leave(self) -> None:
        """Read, and forget, what else comes for a while: a client that still sends would else not see the answer."""
        self._refused, self._since = True, monotonic()
        self._unset_keepalive_if_required()
        if (asked := self._asked) is not None and not asked.response_complete:
            asked.disconnected = True  # an endpoint that waits for the rest of the request ends
            asked.message_event.set()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            with suppress(OSError):  # the client has left, and the event loop does not know it yet
                self.transport.write_eof()


def room() -> int:
    """How many connections there may be: as many as the limit says, and as files may be open. (As many again may have
    been refused, and be about to leave.)"""
    return int(min(limits.CONNECTIONS, max(open_files() - 100, 2) // 2))  # the program has some open, too


def until_cut(app: ASGIApp) -> ASGIApp:
    """The application, whose requests uvicorn cancels when the server must not wait any longer: one without a beginning
    of an answer is answered 503 then (uvicorn would log a fault, and answer 500)."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await app(scope, receive, noted)
        except asyncio.CancelledError:
            if scope["type"] == "http" and not has_begun:
                await error_response(stopping())(scope, receive, send)

    return application


class Server(uvicorn.Server):
    """uvicorn's server, which checks its connections. A signal stops it: answers under way have `stop_seconds` to end;
    then, or at another signal, `cut` is called, which ends them."""

    def __init__(self, config: uvicorn.Config, timeout: float, stop_seconds: float, cut: Callable[[], None]) -> None:
        """`timeout`: see `Connection.check`."""
        super().__init__(config)
        self._timeout, self._stop_seconds, self._cut = timeout, stop_seconds, cut
        config.callback_notify, config.timeout_notify = self._check, 0  # about once a second

    async def _check(self) -> None:
        now = monotonic()
        for c in tuple(self.server_state.connections):
            if isinstance(c, Connection):
                c.check(now, self._timeout)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Take the signals. (uvicorn would send them to itself again when it has stopped, and so not end with 0.)"""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._loop = asyncio.get_running_loop()
        before = {s: signal.signal(s, self.handle_exit) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop. Called by a signal."""
        seconds = 0 if self.should_exit else self._stop_seconds
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, self._cut)
