"""The packages of OpenAI and Anthropic, and others, against a server in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from pyggml.errors import ModelError
from pyggml.serve.connection import until_cut
from pyggml.serve.options import ListenOptions, ServeOptions
from pyggml.serve.run import run

from .conftest import KEY, PATIENCE, get, http_client, post, process, stream

if TYPE_CHECKING:
    import anthropic

Served = tuple[str, "subprocess.Popen[bytes]"]
HI: Any = [{"role": "user", "content": "Tell me of a fox."}]


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key=KEY, max_retries=0) as c:
        yield c


class Where(BaseModel):
    city: Literal["Ulm", "Rom"]


def test_openai_texts(client: openai.OpenAI) -> None:
    got = client.completions.create(model="x", prompt="Once upon a time", max_tokens=5, temperature=0, logprobs=1)
    assert got.choices[0].text and got.choices[0].logprobs and len(got.choices[0].logprobs.tokens or ()) == 5
    stream = client.completions.create(model="x", prompt="Once upon a time", max_tokens=5, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in stream) == got.choices[0].text
    assert [m.id for m in client.models.list()] == ["tales"]


def test_openai_chat(client: openai.OpenAI) -> None:
    options: Any = {"model": "x", "messages": HI, "max_tokens": 6, "temperature": 0}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2, n=2, seed=1)
    assert whole.choices[0].message.content == whole.choices[1].message.content and whole.usage
    assert whole.choices[0].logprobs and len((whole.choices[0].logprobs.content or [])[0].top_logprobs) == 2
    parts = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    said = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert said == whole.choices[0].message.content and parts[-1].usage and parts[-1].usage.completion_tokens == 6


def test_openai_tools_and_structured_output(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "go", "parameters": Where.model_json_schema()}}
    options: Any = {"model": "x", "messages": HI, "max_tokens": 60, "temperature": 0, "frequency_penalty": 9}
    called = client.chat.completions.create(**options, tools=[tool], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls or ()
    assert call.type == "function" and Where.model_validate_json(call.function.arguments)
    parsed = client.chat.completions.parse(**options, response_format=Where)
    assert isinstance(parsed.choices[0].message.parsed, Where)
    more = {"frequency_penalty": 9}
    answer = client.responses.parse(model="x", input=HI, text_format=Where, temperature=0, extra_body=more)
    assert answer.status == "completed" and isinstance(answer.output_parsed, Where)


def test_openai_responses(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="x", input=HI, instructions="Be brief.", max_output_tokens=6, temperature=0)
    with client.responses.stream(
        model="x", input=HI, instructions="Be brief.", max_output_tokens=6, temperature=0
    ) as stream:
        events: list[Any] = list(stream)
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text != ""
    said = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert said == whole.output_text and [e.sequence_number for e in events] == list(range(len(events)))


def test_openai_embeddings_and_errors(client: openai.OpenAI, served: Served) -> None:
    got = client.embeddings.create(model="x", input=["a dog", "a cat"])  # asks for base64
    plain = client.embeddings.create(model="x", input="a dog", encoding_format="float")
    assert got.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
    with (
        openai.OpenAI(base_url=f"{served[0]}/v1", api_key="no") as stranger,
        pytest.raises(openai.AuthenticationError, match="Invalid API Key"),
    ):
        stranger.completions.create(model="x", prompt="y")
    with pytest.raises(openai.BadRequestError, match="exceeds the available context size"):
        client.completions.create(model="x", prompt="a b c d " * 400)


def test_anthropic(served: Served) -> None:
    import anthropic  # takes 1.2 s, which only the process that runs this spends

    with anthropic.Anthropic(base_url=served[0], api_key=KEY, max_retries=0) as client:
        ask_anthropic(client)


def ask_anthropic(client: anthropic.Anthropic) -> None:
    import anthropic

    options: Any = {
        "model": "x",
        "messages": HI,
        "max_tokens": 6,
        "system": "Be brief.",
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**options)
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 6
    with client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text != ""  # pyright: ignore
        assert stream.get_final_message().stop_reason == "max_tokens"
    tool: Any = {"name": "go", "description": "d", "input_schema": Where.model_json_schema()}
    options |= {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 60}
    options["extra_body"] = {"temperature": 0, "frequency_penalty": 9}  # of white space between the parts of JSON
    with client.messages.stream(**options) as stream:
        used = stream.get_final_message()
    assert (
        used.stop_reason == "tool_use"
        and used.content[-1].type == "tool_use"
        and Where.model_validate(used.content[-1].input)
    )
    n = client.messages.count_tokens(model="x", messages=HI, system="Be brief.").input_tokens
    assert n == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.BadRequestError, match="exceeds the available"):
        client.messages.create(model="x", max_tokens=5, messages=[{"role": "user", "content": "a b c " * 500}])


def descriptors(p: subprocess.Popen[bytes]) -> int:
    return len(os.listdir(f"/proc/{p.pid}/fd"))


def test_requests_leave_nothing_behind(served: Served) -> None:
    """200 requests, some of which break off while they stream."""
    url, p = served
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": "Once", "n_predict": 2}
    with http_client(headers=headers) as c:
        c.post(f"{url}/completion", json=body)
        before = descriptors(p)
        for i in range(180):
            assert c.post(f"{url}/completion", json=body).status_code == 200, i
    for _ in range(20):
        with (
            http_client(headers=headers) as c,
            c.stream("POST", f"{url}/completion", json={"prompt": "Once", "stream": True, "ignore_eos": True}) as r,
        ):
            next(r.iter_bytes())
    with http_client(headers=headers) as c:
        while any(s["is_processing"] for s in c.get(f"{url}/slots").json()) or descriptors(p) > before + 1:
            time.sleep(0.02)
        lines = c.get(f"{url}/metrics").text
        assert "llamacpp:requests_processing 0" in lines and "llamacpp:requests_deferred 0" in lines


def raw(url: str, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=PATIENCE) as s:
        s.sendall(data)
        return s.recv(4096)


def test_what_is_no_http(served: Served) -> None:
    url, _ = served
    assert raw(url, b"\x16\x03\x01 nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as s:  # half a request, and gone
        s.sendall(b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    assert get(f"{url}/health").status_code == 200


LONG = {"prompt": "Once", "n_predict": 300, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end(sent: signal.Signals) -> None:
    """Ctrl-C breaks off no graph; the server takes nothing new, and ends with 0."""
    with process("-c", 512, "-np", 1, "--stop-seconds", PATIENCE) as (url, p):
        with stream("POST", f"{url}/completion", json=LONG) as r:
            lines = r.iter_lines()
            next(lines)
            p.send_signal(sent)
            last = [json.loads(line[6:]) for line in lines if line.startswith("data: ")][-1]
        assert last["stop"] is True and last["tokens_predicted"] == 300
        assert p.wait(PATIENCE) == 0
        assert p.stderr is not None and b"Traceback" not in p.stderr.read()


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("seconds", [0, 60])
def test_answers_are_cut_at_the_deadline_or_by_a_second_signal(first: signal.Signals, seconds: int) -> None:
    """Each ends by the error that says so: an answer that streams, and one that waits."""
    with (
        process("-c", 65536, "-np", 1, "--metrics", "--stop-seconds", seconds) as (url, p),
        ThreadPoolExecutor(1) as pool,
    ):
        body = {**LONG, "n_predict": -1}
        with stream("POST", f"{url}/completion", json=body) as r:
            lines = r.iter_lines()
            next(lines)
            waits = pool.submit(post, f"{url}/completion", json={**body, "stream": False})
            while "llamacpp:requests_deferred 1" not in get(f"{url}/metrics").text:
                time.sleep(0.01)
            p.send_signal(first)
            if seconds:
                time.sleep(0.2)
                assert p.poll() is None
                p.send_signal(signal.SIGINT)
            got = [line for line in lines if line]
        assert "the server is stopping" in got[-1]
        assert waits.result().status_code == 503 and "the server is stopping" in waits.result().text
        assert p.wait(PATIENCE) == 0 and p.stderr is not None
        assert b"Traceback" not in p.stderr.read()


def test_what_nobody_waits_for_is_broken_off() -> None:
    """A prompt of a minute is not evaluated to its end when the server must end."""
    with (
        process("-c", 65536, "-np", 1, "-b", 65536, "--stop-seconds", 0, "--metrics") as (url, p),
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(post, f"{url}/completion", json={"prompt": [5] * 60000})
        while "requests_processing 0" in get(f"{url}/metrics").text:
            time.sleep(0.05)
        p.send_signal(signal.SIGTERM)
        assert asked.result().status_code == 503 and "the server is stopping" in asked.result().text, (
            asked.result().text
        )
        assert p.wait(PATIENCE) == 0


def test_what_is_cancelled_gets_an_answer() -> None:
    """uvicorn cancels what has not ended when it must not wait any longer, however busy the machine is. (It would
    answer 500.)"""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def asked(begins: bool) -> list[Any]:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if begins:
                await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.sleep(60)

        sent.clear()
        task = asyncio.ensure_future(until_cut(app)({"type": "http"}, None, send))  # pyright: ignore
        await asyncio.sleep(0)
        task.cancel()
        await task
        return [m.get("status") for m in sent]

    assert asyncio.run(asked(True)) == [200]  # an answer that had begun ends there
    assert asyncio.run(asked(False)) == [503, None] and b"the server is stopping" in sent[1]["body"]


def test_tls(tmp_path: Path) -> None:
    """With a certificate of our own; what speaks no TLS, or not to the end, is left alone."""
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*make, "-days", "2", *subject, "-keyout", key, "-out", cert], check=True, capture_output=True)
    with process("-np", 1, "-c", 512, "--ssl-key-file", key, "--ssl-cert-file", cert, trusted=cert) as (url, p):
        trust = ssl.create_default_context(cafile=cert)
        with http_client(verify=trust, base_url=url) as c:
            assert c.post("/completion", json={"prompt": "Once", "n_predict": 3}).status_code == 200
            with c.stream("POST", "/completion", json=LONG) as r:
                assert sum(line.startswith("data: ") for line in r.iter_lines()) > 100
            assert c.post("/completion", content=b"{").json()["error"]["code"] == 400
        with pytest.raises(httpx.ConnectError):  # nobody has said that the certificate may be trusted
            get(f"{url}/health")
        with pytest.raises(httpx.TransportError):
            get(f"{url}/health".replace("https", "http"))
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as s:
            s.sendall(b"\x16\x03\x01")
        assert get(f"{url}/health", verify=trust).status_code == 200
        p.send_signal(signal.SIGTERM)
        assert p.wait(PATIENCE) == 0 and p.stderr is not None and b"Traceback" not in p.stderr.read()


def test_tls_without_a_key_and_its_certificate(tmp_path: Path) -> None:
    """A line with the names of the files, before a model is loaded; nobody is asked for a password."""
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=x"]
    for i, how in enumerate((["-nodes"], ["-nodes"], ["-passout", "pass:word"])):
        made = ["-keyout", str(tmp_path / f"key{i}"), "-out", str(tmp_path / f"cert{i}")]
        subprocess.run([*make, *how, *made], check=True, capture_output=True)
    for key, cert, text in (
        ("key0", "none", "none"),
        ("cert0", "key0", "cert0 and .*key0: not a private key"),
        ("key1", "cert0", "key1 and .*cert0: not a private key"),
        ("key2", "cert2", "key2: a key with a password"),
        ("", "cert0", "''"),
    ):
        listen = ListenOptions(ssl_key_file=str(tmp_path / key) if key else key, ssl_cert_file=str(tmp_path / cert))
        with pytest.raises((ModelError, OSError), match=text):
            run(pytest.fail, ServeOptions(), listen)


def test_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s.sock")
    command = [sys.executable, "-m", "pyggml", "serve", "-np", "1", "--host", path]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as p:
        try:
            while True:
                with socket.socket(socket.AF_UNIX) as s:
                    if s.connect_ex(path) == 0:
                        break
                assert p.poll() is None
                time.sleep(0.05)
            with http_client(transport=httpx.HTTPTransport(uds=path)) as c:
                assert c.get("http://x/health").json() == {"status": "ok"}
        finally:
            p.kill()
