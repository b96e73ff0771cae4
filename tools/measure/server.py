"""`python -m pyggml.tools.measure.server URL [-c CLIENTS] [-n TOKENS] [-r REQUESTS]`: how fast a server answers.

So many clients at once send requests to /completion, as streams, each with a prompt of its own; llama-server answers
them, too. Printed are requests and tokens per second of all clients together, and for single requests the time to the
first token and between tokens, as median and 99th percentile.
"""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import ArgumentParser
from dataclasses import dataclass, field
from time import perf_counter

import httpx
import numpy as np

_PROMPT = "There was once a king who had {} daughters, and the youngest was so beautiful that the sun itself wondered"


@dataclass
class Times:
    """Seconds to the first token of each request, between tokens of all, and how many tokens there were."""

    first: list[float] = field(default_factory=list[float])
    between: list[float] = field(default_factory=list[float])
    n_tokens: int = 0


async def ask(client: httpx.AsyncClient, url: str, n: int, i: int, times: Times) -> None:
    """Send a request and read its stream."""
    body = {"prompt": _PROMPT.format(i), "n_predict": n, "stream": True, "ignore_eos": True, "temperature": 0}
    last = start = perf_counter()
    async with client.stream("POST", f"{url}/completion", json=body) as r:
        if r.status_code != 200:
            raise SystemExit(f"{url}: {r.status_code} {(await r.aread()).decode()}")
        async for line in r.aiter_lines():
            if not line.startswith("data: "):
                continue
            data = json.loads(line[6:])
            if data["stop"]:
                times.n_tokens += data["tokens_predicted"]
                return
            now = perf_counter()
            (times.between if last > start else times.first).append(now - last)
            last = now


async def measure(url: str, n_clients: int, n_tokens: int, n_requests: int, key: str | None) -> dict[str, float]:
    """Run all clients to their end."""
    times, todo = Times(), iter(range(n_requests))
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(headers=headers, timeout=None, limits=limits) as client:

        async def work() -> None:
            for i in todo:
                await ask(client, url, n_tokens, i, times)

        start = perf_counter()
        await asyncio.gather(*(work() for _ in range(n_clients)))
        took = perf_counter() - start
    shown = {"clients": n_clients, "requests/s": n_requests / took, "tokens/s": times.n_tokens / took}
    for name, found in (("first token", times.first), ("between tokens", times.between)):
        shown |= {
            f"{name}, {what} ms": float(np.percentile(found, p)) * 1e3 for what, p in (("median", 50), ("p99", 99))
        }
    return shown


def main(args: list[str] | None = None) -> None:
    """See the module."""
    parser = ArgumentParser("measure.server", description="How fast a server answers.")
    parser.add_argument("url")
    parser.add_argument("-c", "--clients", type=int, default=8)
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("-r", "--requests", type=int, default=32)
    parser.add_argument("--key")
    o = parser.parse_args(args)
    found = asyncio.run(measure(o.url.rstrip("/"), o.clients, o.tokens, o.requests, o.key))
    print("  ".join(f"{name} {value:.4g}" for name, value in found.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
