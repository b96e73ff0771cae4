"""How fast a server answers, beside llama-server, and whether many requests leave something behind.

    python -m pyggml.tools.measure.server -m MODEL --against vendor/llama.cpp/build/bin/llama-server
    python -m pyggml.tools.measure.server URL -c 8
    python -m pyggml.tools.measure.server -m MODEL --soak 10000

With -m the servers are started here, with as many slots as there are clients at most, and each number of clients asks
them in turns. A client sends requests to /completion one after the other, as streams, each with a prompt of its own.
Printed are tokens and requests per second of all clients together; for single requests the time to the first token and
between tokens, as median and 99th percentile; and the memory of the server. On 2 cores the shipped model takes about a
minute, one of 1.1 B about six: -c 8,32 and -n 16 make that shorter. Nothing else should run.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np

_PROMPT = "There was once a king who had {} daughters, and the youngest was so beautiful that the sun itself wondered"
_CELLS = 512  # of each slot


class Refused(Exception):
    """A server gave another answer than was asked for."""


class Client:
    """One connection, over which requests go one after the other. It does little, so that it takes little time from
    the server beside it."""

    def __init__(self, url: str, key: str | None = None) -> None:
        at = urlsplit(url)
        self._host, self._port = at.hostname or "127.0.0.1", at.port or 80
        self._key = "" if key is None else f"Authorization: Bearer {key}\r\n"
        self._in: asyncio.StreamReader | None = None
        self._out: asyncio.StreamWriter | None = None

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, list[bytes], list[float]]:
        """Send a request. Returns the status, the parts in which the answer came, and when each did."""
        for is_last in (False, True):
            try:
                return await self._ask(method, path, body)
            except asyncio.IncompleteReadError as e:  # servers close a connection after some requests
                self.close()
                if e.partial or is_last:
                    raise Refused("the server closes the connection") from e
        raise AssertionError

    async def _ask(self, method: str, path: str, body: Any) -> tuple[int, list[bytes], list[float]]:
        if self._in is None or self._out is None:
            self._in, self._out = await asyncio.open_connection(self._host, self._port, limit=1 << 24)
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{self._key}Content-Length: {len(data)}\r\n\r\n"
        self._out.write(head.encode() + data)
        lines = (await self._in.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        parts: list[bytes] = []
        times: list[float] = []
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await self._in.readline(), 16):
                parts.append((await self._in.readexactly(size + 2))[:-2])
                times.append(perf_counter())
            await self._in.readline()
        else:
            parts.append(await self._in.readexactly(int(headers.get("content-length", 0))))
            times.append(perf_counter())
        if headers.get("connection") == "close":
            self.close()
        return int(lines[0].split()[1]), parts, times

    def close(self) -> None:
        """Close the connection."""
        if self._out is not None:
            self._out.close()
        self._in = self._out = None


@dataclass
class Times:
    """Seconds to the first token of each request, between tokens of all, and how many tokens there were."""

    first: list[float] = field(default_factory=list[float])
    between: list[float] = field(default_factory=list[float])
    n_tokens: int = 0


async def _text(client: Client, n: int, i: int, times: Times) -> None:
    """Send a request for a text, and read its stream."""
    body = {"prompt": _PROMPT.format(i), "n_predict": n, "stream": True, "ignore_eos": True, "temperature": 0}
    start = perf_counter()
    status, parts, at = await client.ask("POST", "/completion", body)
    events = [
        (line[6:], t) for part, t in zip(parts, at, strict=True) for line in part.split(b"\n") if line[:1] == b"d"
    ]
    if status != 200 or not events:
        raise Refused(f"{status} {b''.join(parts)[:300]!r}")
    last = json.loads(events[-1][0])
    times.n_tokens += last["tokens_predicted"]
    came = [t for _, t in events[:-1]]
    times.first.append(came[0] - start)
    times.between += np.diff(came).tolist()


async def measure(url: str, n_clients: int, n_tokens: int, n_requests: int, key: str | None = None) -> dict[str, float]:
    """Run all clients to their end."""
    times, todo = Times(), iter(range(n_requests))

    async def work() -> None:
        client = Client(url, key)
        for i in todo:
            await _text(client, n_tokens, i + 1000 * n_clients, times)
        client.close()

    start = perf_counter()
    await asyncio.gather(*(work() for _ in range(n_clients)))
    took = perf_counter() - start
    shown = {"tokens/s": times.n_tokens / took, "requests/s": n_requests / took}
    for name, found in (("first", times.first), ("between", times.between)):
        shown |= {f"{name} {what}": float(np.percentile(found, p)) * 1e3 for what, p in (("median", 50), ("p99", 99))}
    return shown


# -- servers that are started here ------------------------------------------------------------------------------------


@contextmanager
def started(command: Sequence[str]) -> Generator[tuple[str, int]]:
    """A server: its address, and the id of its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as p:
        try:
            while True:
                try:
                    with urlopen(f"{url}/health") as r:
                        if r.status == 200:
                            break
                except OSError:
                    if p.poll() is not None:
                        raise SystemExit(f"{' '.join(command)} ended with {p.returncode}") from None
                    time.sleep(0.1)
            yield url, p.pid
        finally:
            p.kill()


def _memory(pid: int) -> dict[str, float]:
    """MB of memory that a process has now, and of them what is no part of a file."""
    with open(f"/proc/{pid}/status") as f:
        found = dict(line.split(":", 1) for line in f)
    return {"RSS": int(found["VmRSS"].split()[0]) / 1e3, "no file": int(found["RssAnon"].split()[0]) / 1e3}


def _compare(o: Any, counts: Sequence[int]) -> None:
    np_, given = max(counts), ["-m", o.model, "-t", str(o.threads)]
    shared = ["-np", str(np_), "-c", str(np_ * _CELLS), *given]
    commands = {"pyggml": [sys.executable, "-m", "pyggml", "serve", *shared, "--queue", "1000"]}
    if o.against:
        commands["llama-server"] = [o.against, *shared]
    print(f"{os.path.basename(o.model)}, {o.threads} threads, {np_} slots, texts of {o.tokens} tokens; times in ms, MB")
    for n in counts:
        best: dict[str, dict[str, float]] = {}
        for _ in range(o.rounds):
            for name, command in commands.items():
                with started(command) as (url, pid):
                    asyncio.run(measure(url, n, o.tokens, n))  # what is done once
                    got = asyncio.run(measure(url, n, o.tokens, o.requests or 3 * n)) | _memory(pid)
                if name not in best or got["tokens/s"] > best[name]["tokens/s"]:
                    best[name] = got
        for name, got in best.items():
            print(f"{n:4} clients  {name:12}  " + "  ".join(f"{k} {v:.4g}" for k, v in got.items()), flush=True)
        if len(best) > 1:
            ours, other = best.values()
            print(f"{'':14}{'ratio':12}  " + "  ".join(f"{k} {v / other[k]:.2f}" for k, v in ours.items()), flush=True)


# -- many requests ----------------------------------------------------------------------------------------------------

_CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
_KINDS: Sequence[tuple[str, str, Any, int]] = (  # what is asked, and the status of the answer
    ("POST", "/completion", {"prompt": "Once upon {}", "n_predict": 1}, 200),
    ("POST", "/completion", {"prompt": "The fox {}", "n_predict": 4, "stream": True}, 200),
    ("POST", "/completion", {"prompt": ["A {}", "B"], "n_predict": 2, "n_probs": 3}, 200),
    ("POST", "/completion", {"prompt": "A {}", "n_predict": 3, "grammar": 'root ::= "a" | "b"'}, 200),
    ("POST", "/completion", {"prompt": "A {}", "n_predict": 4, "json_schema": {"type": "integer"}, "top_k": 5}, 200),
    ("POST", "/completion", {"prompt": "A {}", "n_predict": 2, "cache_prompt": False, "mirostat": 2}, 200),
    ("POST", "/completion", {"prompt": "A {}", "temperature": "hot"}, 400),
    ("POST", "/completion", {"prompt": "A {} " * 999}, 400),
    ("POST", "/v1/completions", {"prompt": "A {}", "max_tokens": 2, "n": 2, "logprobs": 2, "echo": True}, 200),
    ("POST", "/v1/chat/completions", _CHAT, 200),
    ("POST", "/v1/chat/completions", {**_CHAT, "stream": True, "logprobs": True, "top_logprobs": 2}, 200),
    ("POST", "/v1/chat/completions", {**_CHAT, "response_format": {"type": "json_object"}}, 200),
    ("POST", "/v1/responses", {"input": "Hello {}", "max_output_tokens": 2}, 200),
    ("POST", "/v1/messages", {**_CHAT, "stream": True}, 200),
    ("POST", "/v1/embeddings", {"input": ["a text {}", "another"]}, 200),
    ("POST", "/tokenize", {"content": "a text {}", "with_pieces": True}, 200),
    ("POST", "/slots/0?action=erase", None, 200),
    ("GET", "/slots", None, 200),
    ("GET", "/props", None, 200),
    ("GET", "/v1/models", None, 200),
    ("GET", "/main.js", None, 200),
    ("GET", "/nothing", None, 404),
    ("LEAVE", "/completion", {"prompt": "A {}", "stream": True, "ignore_eos": True, "n_predict": 300}, 0),
)


async def soak(url: str, pid: int, n_requests: int, n_clients: int) -> None:
    """Send requests of all kinds, some of which nobody waits for, and print what the process has after each tenth."""
    todo, wrong = iter(range(n_requests)), list[str]()

    async def work() -> None:
        client = Client(url)
        for i in todo:
            if i % (n_requests // 10) == 0:
                _show(pid, i)
            method, path, body, code = _KINDS[i % len(_KINDS)]
            body = json.loads(json.dumps(body).replace("{}", str(i)))
            if method == "LEAVE":
                client.close()
                leaving = asyncio.ensure_future(client.ask("POST", path, body))
                await asyncio.wait([leaving], timeout=0.002 * (i % 7))
                leaving.cancel()
                await asyncio.gather(leaving, return_exceptions=True)
                client.close()
                continue
            status, parts, _ = await client.ask(method, path, body)
            if status != code:
                wrong.append(f"{method} {path} {body}: {status} {b''.join(parts)[:200]!r}")
        client.close()

    start = perf_counter()
    await asyncio.gather(*(work() for _ in range(n_clients)))
    took = perf_counter() - start
    await asyncio.sleep(6)  # connections that are idle have ended
    _show(pid, n_requests)
    print(f"{n_requests} requests by {n_clients} clients in {took:.1f} s; {len(wrong)} had another status")
    for text in wrong[:5]:
        print(text)


def _show(pid: int, n: int) -> None:
    memory = "  ".join(f"{name} {mb:.1f} MB" for name, mb in _memory(pid).items())
    n_fds, n_threads = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))
    print(f"{n:6} requests: {memory}  {n_fds} descriptors  {n_threads} threads", flush=True)


def main(args: list[str] | None = None) -> None:
    """See the module."""
    parser = ArgumentParser("measure.server", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="a server that runs")
    parser.add_argument("-m", "--model", help="a GGUF file: servers are started here")
    parser.add_argument("--against", metavar="BINARY", help="llama-server")
    parser.add_argument("--soak", metavar="N", type=int, help="send so many short requests of all kinds")
    parser.add_argument("-c", "--clients", default="1,8,32", help="how many, or several numbers (default: 1,8,32)")
    parser.add_argument("-n", "--tokens", type=int, default=32, help="of a text (default: 32)")
    parser.add_argument("-r", "--requests", type=int, help="in all (default: 3 of each client)")
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    parser.add_argument("--rounds", type=int, default=2, help="of which the best is printed (default: 2)")
    parser.add_argument("--key", help="of the server at the URL")
    o = parser.parse_args(args)
    if (o.url is None) == (o.model is None):
        parser.error("give a URL, or -m MODEL")
    counts = [int(n) for n in o.clients.split(",")]
    if o.soak and o.model:
        command = [sys.executable, "-m", "pyggml", "serve", "-m", o.model, "-np", "4", "-c", "2048"]
        with started(command) as (url, pid):
            asyncio.run(soak(url, pid, o.soak, counts[-1]))
    elif o.model:
        _compare(o, counts)
    else:
        for n in counts:
            found = asyncio.run(measure(o.url, n, o.tokens, o.requests or 3 * n, o.key))
            print(f"{n:4} clients  " + "  ".join(f"{name} {value:.4g}" for name, value in found.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
