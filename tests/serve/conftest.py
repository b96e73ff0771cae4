"""A server in this process, and one in a process of its own; both serve the model that ships."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

import pyggml as gg
from pyggml.serve import ServeOptions, create_app

KEY = "key-of-the-test"
PATIENCE = 300  # seconds: the machine may be busy
_TRUST = ssl.create_default_context()  # else each request reads all certificates of the machine: 30 ms
get, post, stream, http_client = (
    partial(f, timeout=PATIENCE, verify=_TRUST) for f in (httpx.get, httpx.post, httpx.stream, httpx.Client)
)


@pytest.fixture(scope="session")
def tales() -> gg.Model:
    return gg.load_model()


@pytest.fixture(scope="module")
def client(tales: gg.Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """Four slots of 512 tokens."""
    folder = str(tmp_path_factory.mktemp("slots"))
    options = ServeOptions(
        n_ctx=2048, alias="tales", metrics=True, slot_save_path=folder, context={"n_threads": 1}, n_queue=40
    )
    with TestClient(create_app(tales, options)) as c:
        yield c


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


Served = Callable[..., Iterator[tuple[str, "subprocess.Popen[bytes]"]]]


@contextmanager
def process(*args: object, trusted: str | None = None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`pyggml serve` in a process: its address, and the process, which is ended at the end. `trusted`: the certificate
    that it has."""
    port = free_port()
    command = [sys.executable, "-m", "pyggml", "serve", "--port", port, "-t", 1, *args]
    url = f"http{'s' * (trusted is not None)}://127.0.0.1:{port}"
    verify = ssl.create_default_context(cafile=trusted) if trusted else _TRUST
    with subprocess.Popen([str(a) for a in command], stderr=subprocess.PIPE) as p:
        try:
            while True:
                try:
                    if get(f"{url}/health", verify=verify).status_code == 200:
                        break
                except httpx.TransportError:
                    assert p.poll() is None, p.stderr.read() if p.stderr else ""
                    time.sleep(0.05)
            yield url, p
        finally:
            p.kill()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with process("-c", 2048, "-np", 4, "--api-key", KEY, "--metrics", "--alias", "tales") as found:
        yield found


def events(text: str) -> list[str]:
    """The data of a stream's events."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def slots_path(client: TestClient) -> Path:
    return Path(client.app.state.service.options.slot_save_path)  # pyright: ignore
