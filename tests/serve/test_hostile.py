"""Clients that are slow, many or gone, and a machine that fails: over real sockets."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

import pyggml as gg
from pyggml import limits
from pyggml.serve import ServeOptions, connection, create_app
from pyggml.serve.connection import Connection, Server

from .conftest import PATIENCE, get, http_client, post, process

HEAD = b"POST /completion HTTP/1.1\r\nHost: x\r\n"


class Listening:
    """A server in a thread of this process, where a test can change its limits."""

    def __init__(self, tales: gg.Model, **options: Any) -> None:
        given = ServeOptions(**{"n_ctx": 2048, "context": {"n_threads": 1}, **options})
        self.app = create_app(tales, given)
        self.thread = self.app.state.service.thread
        config = uvicorn.Config(self.app, port=0, http=Connection, ws="none", lifespan="on", log_level="critical")
        self.server = Server(config, given.timeout, 5, self.thread.cut)
        self._runs = threading.Thread(target=self.server.run)
        self._runs.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def n_open(self) -> int:
        """How many connections there are."""
        return len(self.server.server_state.connections)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def stop(self) -> None:
        self.server.should_exit = True
        self._runs.join()


@contextmanager
def listening(tales: gg.Model, **options: Any) -> Iterator[Listening]:
    found = Listening(tales, **options)
    try:
        yield found
    finally:
        found.stop()


def until(holds: Callable[[], bool], what: str = "") -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def whole(s: socket.socket) -> bytes:
    """All that comes before the other side closes."""
    data = b""
    while part := s.recv(1 << 16):
        data += part
    return data


def request(body: Any, path: str = "/completion") -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def drip(s: socket.socket, first: bytes, then: bytes) -> bytes:
    """Send a part, and then a byte after the other, until the server answers and closes. Returns all that it sent."""
    s.sendall(first)
    s.settimeout(0.05)
    data, end = b"", time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            if not (part := s.recv(1 << 16)):
                return data
            data += part
        except TimeoutError:
            with suppress(OSError):
                s.sendall(then)
    raise AssertionError(f"the server waits for ever; it sent {data!r}")


def test_who_sends_slowly_is_answered_408(tales: gg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent from the first, a byte now and then in the headers, in those of a second request, or in the body; and
    what is sent when the answer has been given."""
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.4)
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.4)
    ok = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    post = HEAD + b"Content-Length: 1000000\r\n\r\n{"
    cases: dict[str, tuple[bytes, bytes, list[str]]] = {
        "silent": (b"", b"", ["408"]),
        "headers": (b"GET /heal", b"x", ["408"]),
        "lines": (b"GET /health HTTP/1.1\r\n", b"X: y\r\n", ["408"]),
        "second": (ok + b"GE", b"T", ["200", "408"]),
        "body": (post, b" ", ["408"]),
        "chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", ["408"]),
        "after": (post.replace(b"/completion", b"/none"), b" ", ["404"]),
        "key": (post, b"a", ["408"]),
    }
    with listening(tales, n_parallel=1) as server, ThreadPoolExecutor(len(cases)) as pool:

        def tried(case: tuple[bytes, bytes, list[str]]) -> bytes:
            with server.connect() as s:
                return drip(s, *case[:2])

        got = pool.map(tried, cases.values())
        for name, data, (_, _, codes) in zip(cases, got, cases.values(), strict=True):
            assert [x[:3].decode() for x in data.split(b"HTTP/1.1 ")[1:]] == codes, (name, data)
            assert codes[-1] != "408" or b'"code":408' in data
        assert get(f"{server.url}/health").status_code == 200
        until(lambda: server.n_open == 0)


def test_a_long_body_that_comes_steadily_is_read(tales: gg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.2)
    data = json.dumps({"content": "x" * 10_000}).encode()
    with listening(tales, n_parallel=1) as server, server.connect() as s:
        s.sendall(f"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode())
        for i in range(0, len(data), 1000):
            s.sendall(data[i : i + 1000])
            time.sleep(0.05)  # 20,000 bytes a second
        assert s.recv(100).startswith(b"HTTP/1.1 200")


def test_who_takes_nothing_of_an_answer_is_left(tales: gg.Model) -> None:
    with listening(tales, n_parallel=1, timeout=1) as server, socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", server.port))
        long = max(range(300, 2000), key=lambda i: len(tales.vocab.token_to_piece(i)))
        s.sendall(request({"tokens": [long] * 500_000}, "/detokenize"))
        until(lambda: server.n_open == 1)
        assert get(f"{server.url}/health").status_code == 200
        until(lambda: server.n_open == 0)
        head, _, body = whole(s).partition(b"\r\n\r\n")
        assert len(body) < int(head.partition(b"content-length: ")[2].split()[0])


def test_headers_of_a_megabyte(tales: gg.Model) -> None:
    with listening(tales, n_parallel=1) as server:
        for data in (b"X: " + b"x" * (1 << 20), b"X: y\r\n" * 200_000):
            with server.connect() as s:
                s.sendall(HEAD + data + b"\r\n\r\n")
                got = whole(s)
                assert got.startswith(b"HTTP/1.1 431") and b'"code":431' in got
        with server.connect() as s:  # in the middle of a body that is under way
            s.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
            assert whole(s).startswith(b"HTTP/1.1 400")


def test_heads_that_a_proxy_may_read_otherwise(tales: gg.Model) -> None:
    """A length and chunks: where such a request ends is a matter of opinion, so it is refused, and nothing after it is
    taken for a request. So are other versions of HTTP."""
    length, chunked = b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"
    after = b"\r\n0\r\n\r\nGET /props HTTP/1.1\r\nHost: x\r\n\r\n"
    cases = {
        HEAD + length + chunked + after: b"400",
        HEAD + chunked + length + after: b"400",
        b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n": b"505",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n": b"505",
    }
    with listening(tales, n_parallel=1) as server:
        for data, code in cases.items():
            with server.connect() as s:
                s.sendall(data)
                got = whole(s)
                assert got.startswith(b"HTTP/1.1 " + code) and got.count(b"HTTP/1.1 ") == 1 and b'"code":' + code in got
            head = b"HEAD" + data[data.index(b" ") :]  # is answered without a body
            with server.connect() as s:
                s.sendall(head)
                got = whole(s)
                assert got.startswith(b"HTTP/1.1 " + code) and (got.endswith(b"\r\n\r\n") or b"PRI" in data), got


def test_many_headers(tales: gg.Model) -> None:
    with listening(tales, n_parallel=1) as server:
        for n, code in ((300, b"431"), (200, b"200")):
            with server.connect() as s:
                s.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * n + b"\r\n")
                assert s.recv(1 << 16).split()[1] == code


def test_chunks_of_a_byte(tales: gg.Model) -> None:
    """Each costs as much as a long one: 16 MB of them would take minutes, in which nobody else is heard."""
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b'{"content": "' + b"x" * 100_000 + b'"}'

    def chunked(size: int) -> bytes:
        parts = (body[i : i + size] for i in range(0, len(body), size))
        return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"

    with listening(tales, n_parallel=1) as server:
        for size, code in ((1, b"400"), (16, b"400"), (32, b"200"), (1000, b"200")):
            with server.connect() as s:
                s.sendall(chunked(size))
                got = whole(s) if code == b"400" else s.recv(1 << 16)
                assert got.split()[1] == code and (b"chunks of fewer than 64 bytes" in got) == (code == b"400"), got


def test_a_client_that_says_it_will_send_no_more(tales: gg.Model) -> None:
    """Its answers still come, as from llama-server; what takes longer than a second is taken for a client that left."""
    short, chat = {"prompt": "Once", "n_predict": 3, "temperature": 0}, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    cases = {
        chat: [b'{"status":"ok"}'],
        request(short): [b'"stop":true'],
        request({**short, "stream": True}): [b'"stop":false', b'"stop":true'],
        request(short) + chat + request(short): [b'"stop":true', b'{"status":"ok"}', b'"stop":true'],
        HEAD + b"X: ": [],
        request(short)[:-1]: [],
        b"": [],
    }
    with listening(tales, n_parallel=1) as server:
        get(f"{server.url}/health")
        for data, parts in cases.items():
            with server.connect() as s:
                s.sendall(data)
                s.shutdown(socket.SHUT_WR)
                got = whole(s)
                for part in parts:
                    assert part in got, (data, got)
                    got = got[got.index(part) + 1 :]
                assert b"HTTP" not in got
    with listening(tales, n_parallel=1, context_shift=True) as server:  # an answer without an end
        with server.connect() as s:
            s.sendall(request({**short, "n_predict": -1, "ignore_eos": True}))
            s.shutdown(socket.SHUT_WR)
            assert whole(s) == b""
        until(lambda: not any(slot["is_processing"] for slot in get(f"{server.url}/slots").json()))


def test_a_client_that_sends_no_more_and_reads_slowly(tales: gg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is complete in time leaves whole, though that takes longer."""
    monkeypatch.setattr(connection, "_HALF", 4.0)  # a busy machine takes more than the second to compute it
    with listening(tales, n_parallel=1) as server, socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.settimeout(PATIENCE)
        s.connect(("127.0.0.1", server.port))
        s.sendall(request({"content": "x y z " * 300_000}, "/tokenize"))
        s.shutdown(socket.SHUT_WR)
        time.sleep(4.5)
        head, _, body = whole(s).partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}\r\n".encode() in head + b"\r\n" and len(body) > 7_000_000


def test_bodies_that_are_too_long_together(tales: gg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says that much will come is refused at once; who brings too much beside others, when it does."""
    monkeypatch.setattr(limits, "BODIES_BYTES", 100_000)
    with listening(tales, n_parallel=1) as server, ExitStack() as stack:
        for length in (limits.REQUEST_BYTES + 1, 10**19):
            s = stack.enter_context(server.connect())
            s.sendall(HEAD + b"Content-Length: %d\r\nExpect: 100-continue\r\n\r\n" % length)
            assert whole(s).startswith(b"HTTP/1.1 413")
        many = [stack.enter_context(server.connect()) for _ in range(3)]
        for s in many:
            s.sendall(HEAD + b"Content-Length: 45000\r\n\r\n" + b" " * 40_000)
            time.sleep(0.1)
        assert whole(many[2]).startswith(b"HTTP/1.1 503")
        assert post(f"{server.url}/tokenize", json={"content": "x" * 50_000}).status_code == 200
        many[0].sendall(b" " * 4_000 + b'{"prompt": "Once", "n_predict": 1}'.ljust(1_000))
        assert many[0].recv(100).startswith(b"HTTP/1.1 200")
        many[1].close()
        until(lambda: server.app.state.n_coming == 0)


def test_who_brings_a_long_body_and_waits_keeps_nobody_out(tales: gg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a body with more than its share of what all may have is refused when they are too long together."""
    monkeypatch.setattr(limits, "BODIES_BYTES", 3_000_000)
    with listening(tales, n_parallel=1) as server, ExitStack() as stack:
        many = [stack.enter_context(server.connect()) for _ in range(3)]
        for s in many:
            s.sendall(HEAD + b"Content-Length: 2000000\r\n\r\n" + b" " * 990_000)
        until(lambda: server.app.state.n_coming == 3 * 990_000)
        assert post(f"{server.url}/tokenize", json={"content": " " * 500_000}).status_code == 200
        assert post(f"{server.url}/tokenize", json={"content": " " * 2_000_000}).status_code == 503
        assert get(f"{server.url}/health").status_code == 200
    assert server.app.state.n_bodies == server.app.state.n_coming == 0


def test_who_is_refused_and_leaves_is_gone(tales: gg.Model) -> None:
    """Its place is free at once, not a second later."""
    with listening(tales, n_parallel=1) as server:
        begun = time.monotonic()
        for _ in range(5):
            with server.connect() as s:
                s.sendall(b"nonsense\r\n\r\n")
                assert whole(s).startswith(b"HTTP/1.1 400")
            until(lambda: server.n_open == 0)
        assert time.monotonic() - begun < 3


def test_more_connections_than_there_may_be(tales: gg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones are answered 503, or wait for those that are idle to go. Then all is as before."""
    monkeypatch.setattr(limits, "CONNECTIONS", 50)
    monkeypatch.setattr("pyggml.serve.connection._LINGER", 0.3)
    monkeypatch.setattr("pyggml.serve.connection._IDLE", 0.5)
    with listening(tales, n_parallel=2) as server:
        get(f"{server.url}/health")
        until(lambda: server.n_open == 0)
        before = len(os.listdir("/proc/self/fd"))
        many = [server.connect() for _ in range(50)]
        with server.connect() as s:
            assert whole(s).startswith(b"HTTP/1.1 503") and server.n_open <= 52
        many += [server.connect() for _ in range(200)]  # most of which are left at once

        def answered() -> bool:
            body = {"prompt": "Once", "n_predict": 2}
            with suppress(httpx.TransportError):
                return post(f"{server.url}/completion", json=body).status_code == 200
            return False

        until(answered)  # those that were first have asked for nothing, and make room
        while many:
            many.pop().close()
        until(lambda: server.n_open == 0)
        with ThreadPoolExecutor(20) as pool:
            assert {r.status_code for r in pool.map(lambda _: get(f"{server.url}/health"), range(40))} == {200}
        until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_thousand_connections(tales: gg.Model) -> None:
    """All of them are open at once, all ask at once, and each has its own answer."""
    body = b'{"content": "%04d", "with_pieces": true}'
    with listening(tales) as server, ExitStack() as stack:
        many = [stack.enter_context(server.connect()) for _ in range(1000)]
        until(lambda: server.n_open == 1000)
        for i, s in enumerate(many):
            data = body % i
            s.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data))
        for i, s in enumerate(many):
            answer = HTTPResponse(s)
            answer.begin()
            assert answer.status == 200
            assert "".join(t["piece"] for t in json.load(answer)["tokens"]).strip() == f"{i:04d}"
        assert server.n_open == 1000
        r = post(f"{server.url}/completion", json={"prompt": "a", "n_predict": 1})  # one more has room
        assert r.status_code == 200


@pytest.mark.parametrize("reset", [False, True])
def test_clients_that_vanish_in_each_phase(tales: gg.Model, reset: bool) -> None:
    """By closing, and by a reset. Nothing is left of them, and others get the same answers."""
    body = {"prompt": "Once upon a time", "n_predict": 400, "ignore_eos": True, "temperature": 0}
    long = {**body, "prompt": "Once upon a time there was a king " * 50}
    whole_request = request(body)
    phases = {
        "connect": (b"", 0),
        "line": (b"POST /comp", 0),
        "headers": (HEAD, 0),
        "body": (whole_request[:-9], 0),
        "asked": (whole_request, 0),
        "prompt": (request(long), 0),
        "stream": (request({**body, "stream": True}), 600),
        "pipeline": (whole_request * 5, 0),
        "embed": (request({"input": ["x"] * 64}, "/v1/embeddings"), 0),
    }
    with listening(tales, n_parallel=2, n_queue=9) as server:

        def answer() -> str:
            short = {**body, "n_predict": 5, "cache_prompt": False}
            return post(f"{server.url}/completion", json=short).json()["content"]

        alone = answer()
        holders = [server.connect() for _ in range(2)]
        for s in holders:  # so that others wait in the queue
            s.sendall(request({**body, "stream": True}))
        for data, n in phases.values():
            for pause in (0, 0.02):
                s = server.connect()
                s.sendall(data)
                if n and pause:
                    s.recv(n)
                time.sleep(pause)
                if reset:
                    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                s.close()
        for s in holders:
            s.close()
        assert answer() == alone
        until(lambda: server.n_open == 0 and server.thread.n_waiting == 0)
        slots = get(f"{server.url}/slots").json()
        assert not any(slot["is_processing"] for slot in slots)
        assert server.thread._open == {} and not server.thread.stopped


# -- a machine that fails ---------------------------------------------------------------------------------------------


def test_kill_9_and_the_same_slots_again(tmp_path: Path) -> None:
    """Whenever it comes, files are whole, and another server goes on from them."""
    args = ("-c", 2048, "-np", 2, "--slot-save-path", tmp_path)
    body = {"prompt": "Once upon a time there was a king", "n_predict": 60, "ignore_eos": True, "temperature": 0}
    with process(*args) as (url, p), http_client(base_url=url) as c:
        first = c.post("/completion", json=body).json()
        saved = [c.post("/slots/0?action=save", json={"filename": f"s{i}"}).json() for i in range(3)]
        assert {x["n_saved"] for x in saved} == {first["tokens_cached"]}
        size = saved[0]["n_written"]

        def save() -> None:
            with suppress(httpx.TransportError):
                while True:
                    post(f"{url}/slots/0?action=save", json={"filename": "s0"})

        saves = threading.Thread(target=save)
        saves.start()
        time.sleep(0.1)
        p.kill()
        saves.join()
    assert {path.name: path.stat().st_size for path in tmp_path.iterdir()} == dict.fromkeys(("s0", "s1", "s2"), size)
    with process(*args) as (url, _), http_client(base_url=url) as c:
        for i in range(3):
            got = c.post("/slots/1?action=restore", json={"filename": f"s{i}"})
            assert got.status_code == 200 and got.json()["n_restored"] == saved[0]["n_saved"]
        again = c.post("/completion", json={**body, "prompt": body["prompt"] + first["content"]}).json()
        assert again["timings"]["cache_n"] > 60
        longer = c.post("/completion", json={**body, "n_predict": 120, "cache_prompt": False}).json()["content"]
        assert longer == first["content"] + again["content"]


def test_a_full_disk_for_slots(tmp_path: Path) -> None:
    """A file that cannot be written leaves the one before as it was, and the server goes on."""
    with process("-c", 2048, "-np", 1, "--slot-save-path", tmp_path) as (url, p), http_client(base_url=url) as c:
        body = {"prompt": "Once upon a time", "n_predict": 4, "ignore_eos": True, "temperature": 0}
        c.post("/completion", json=body)
        assert c.post("/slots/0?action=save", json={"filename": "s"}).status_code == 200
        data = (tmp_path / "s").read_bytes()
        answer = c.post("/completion", json={**body, "n_predict": 100}).json()["content"]
        hard = resource.prlimit(p.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(p.pid, resource.RLIMIT_FSIZE, (len(data) + 9, hard))  # no file may be longer
        for name in ("s", "t"):
            r = c.post("/slots/0?action=save", json={"filename": name})
            assert r.status_code == 507 and "File too large" in r.json()["error"]["message"]
        assert [path.name for path in tmp_path.iterdir()] == ["s"] and (tmp_path / "s").read_bytes() == data
        assert c.post("/completion", json={**body, "n_predict": 100}).json()["content"] == answer
        resource.prlimit(p.pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert c.post("/slots/0?action=save", json={"filename": "s"}).json()["n_written"] > len(data)


def test_a_model_file_that_is_replaced_or_cut(tmp_path: Path, tales: gg.Model) -> None:
    """Another file of that name changes nothing for a server that has read the old one. One that is cut under a server
    takes its answers, by an error that names it, and not its life."""
    path = tmp_path / "m.gguf"
    shutil.copy(tales.path, path)
    with process("-m", path, "-c", 2048, "-np", 1) as (url, p), http_client(base_url=url) as c:
        body = {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0}
        answer = c.post("/completion", json=body).json()["content"]
        path.rename(tmp_path / "old")
        path.write_bytes(b"something else")
        assert c.post("/completion", json={**body, "cache_prompt": False}).json()["content"] == answer
        os.truncate(tmp_path / "old", 8192)
        for where, asked in (("/completion", body), ("/v1/embeddings", {"input": "x"})):
            r = c.post(where, json=asked)
            assert r.status_code == 500 and "m.gguf: the file had" in r.json()["error"]["message"], r.text
        assert c.get("/v1/models").status_code == 200 and p.poll() is None
        p.send_signal(signal.SIGTERM)
        assert p.wait(PATIENCE) == 0


def test_a_client_that_leaves_while_it_is_refused(tales: gg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is reset when the answer is written, and before the event loop knows of it: the server goes on."""
    with listening(tales) as here, here.connect() as s:
        until(lambda: here.n_open == 1)
        leave = Connection._leave  # pyright: ignore[reportPrivateUsage]

        def after_reset(self: Connection) -> None:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            s.close()
            leave(self)

        monkeypatch.setattr(Connection, "_leave", after_reset)
        monkeypatch.setattr(limits, "HEADER_SECONDS", 0.0)
        until(lambda: s.fileno() < 0 and here.n_open == 0)
        monkeypatch.undo()
        assert get(here.url + "/health").status_code == 200


def test_who_waits_for_a_slot_and_leaves_is_forgotten(tales: gg.Model) -> None:
    """What waits for a slot is looked at between two steps: a client could let it become any number."""
    with listening(tales, n_parallel=1, context_shift=True) as server, server.connect() as endless:
        endless.sendall(request({"prompt": "x", "n_predict": -1, "ignore_eos": True, "stream": True}))
        assert endless.recv(100)
        jobs = server.thread._jobs
        for _ in range(20):
            with server.connect() as s:
                s.sendall(request({}, "/slots/0?action=erase"))
                until(lambda: bool(jobs))
        until(lambda: not jobs, "jobs of clients that have left")
