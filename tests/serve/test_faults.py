"""What clients may do wrong, and clients that leave: each gets its error, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import math
import random
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from pydantic import ValidationError
from starlette.testclient import TestClient

import pyggml as gg
from pyggml import limits
from pyggml.errors import Aborted, ModelError
from pyggml.llm.generate.engine import Token
from pyggml.llm.generate.generation import Generation, TextRequest
from pyggml.llm.samplers import TextParams
from pyggml.serve import ServeOptions, anthropic, create_app, long_json, responses
from pyggml.serve.engine_thread import Answering, EngineThread
from pyggml.serve.http import dumps
from pyggml.serve.schemas import Body
from pyggml.serve.turns import Turns

from .conftest import PATIENCE

COMPLETION, CHAT = "/completion", "/v1/chat/completions"
_TOOL = {"type": "function", "function": {"name": "f"}}
_DEEP = b'{"tool_choice": "none", "tools": [{"type": "function", "name": "f", "parameters": {"a": '
_DEEP += b"[" * 900 + b"1e400" + b"]" * 900 + b'}}], "input": "x", "max_output_tokens": 1}'
_EDIT = {"node": "l_out-0", "tokens": [10**30]}


@pytest.mark.parametrize(
    ("path", "body", "code", "says"),
    [
        (COMPLETION, b"{", 400, "no JSON"),
        (COMPLETION, b"", 400, "no JSON"),
        (COMPLETION, b'{"prompt": "\xff"}', 400, "not UTF-8"),
        (COMPLETION, b"[" * 100_000, 400, "nested too deep"),
        (COMPLETION, b'{"prompt": "x", "ignored": [' + b"[]," * (1 << 20) + b"0]}", 413, "1048576 brackets"),
        (COMPLETION, b'{"prompt": "x", "ignored": {' + b'"":1,' * (1 << 20) + b'"":1}}', 413, "1048576 brackets"),
        (COMPLETION, b'{"prompt": NaN}', 400, "NaN"),
        (COMPLETION, b'{"seed": ' + b"9" * 5000 + b"}", 400, "no JSON"),
        (COMPLETION, [], 400, "must be a JSON object"),
        (COMPLETION, {}, 400, '"prompt" must be provided'),
        (COMPLETION, {"prompt": 3}, 400, "prompt must be text"),
        (COMPLETION, {"prompt": []}, 400, "the prompt is empty"),
        (COMPLETION, {"prompt": [1, 99999]}, 400, "token 99999 is none of the 2048"),
        (COMPLETION, {"prompt": [1, -1]}, 400, "token -1"),
        (COMPLETION, {"prompt": [1, None]}, 400, "prompt: a list has texts and tokens"),
        (
            COMPLETION,
            {"prompt": {"prompt_string": "x", "multimodal_data": ["eA=="]}},
            400,
            "0 markers <__media__> for 1",
        ),
        (COMPLETION, {"prompt": {"prompt_string": "<__media__>", "multimodal_data": ["eA=="]}}, 400, "takes none"),
        (COMPLETION, {"prompt": {"prompt_string": "<__media__>", "multimodal_data": ["?"]}}, 400, "no base64"),
        ("/v1/completions", {"prompt": {"prompt_string": "x", "multimodal_data": ["eA=="]}}, 501, "multimodal_data"),
        (COMPLETION, {"prompt": "x", "temperature": "hot"}, 400, "temperature: Input should be a valid number"),
        (COMPLETION, {"prompt": "x", "temperature": 1e99}, 400, "temp must be a finite number"),
        (COMPLETION, {"prompt": "x", "n_predict": 10**30}, 400, "64 bits"),
        (COMPLETION, {"prompt": "x", "top_p": 2}, 400, "top_p must be from 0 to 1"),
        (COMPLETION, {"prompt": "x", "grammar": "root ::= ("}, 400, "grammar"),
        (COMPLETION, {"prompt": "x", "json_schema": {"type": "fog"}}, 400, "fog"),
        (COMPLETION, {"prompt": "x", "logit_bias": [[1]]}, 400, "logit_bias"),
        (COMPLETION, {"prompt": "x", "logit_bias": {"99999": 1}}, 400, "99999"),
        (COMPLETION, {"prompt": "x", "logit_bias": {"9" * 5000: 1}}, 400, "there is no token 999"),
        (COMPLETION, {"prompt": "x", "n_predict": 1, "logit_bias": [["a", 1]] * 5000}, 400, "BIASED_TEXTS = 4096"),
        (COMPLETION, {"prompt": "x", "stop": [""]}, 400, "stop string"),
        (COMPLETION, {"prompt": "x", "n_probs": -1}, 400, "n_probs"),
        (COMPLETION, {"prompt": "x", "n_cmpl": 0}, 400, "n must be"),
        (COMPLETION, {"prompt": "x", "n_cmpl": 10**9}, 400, "n must be"),
        (COMPLETION, {"prompt": "x", "lora": [{"id": 0, "scale": 1}]}, 400, "there is no adapter 0"),
        (COMPLETION, {"prompt": "x y " * 600}, 400, "exceeds the available context size (512 tokens)"),
        (CHAT, {}, 400, '"messages" is required'),
        (CHAT, {"messages": "hi"}, 400, "messages must be a list"),
        (CHAT, {"messages": [{"content": "x"}]}, 400, "messages[0] has no role"),
        (CHAT, {"messages": [], "tool_choice": "required"}, 400, "needs tools"),
        (CHAT, {"messages": [], "tools": [{"type": "function"}]}, 400, "tools[0]"),
        (CHAT, {"messages": [], "response_format": {"type": "poem"}}, 400, "poem"),
        (CHAT, {"messages": [], "tools": [_TOOL], "tool_choice": {"function": {"name": []}}}, 400, "no tool []"),
        (CHAT, {"messages": [], "tools": [_TOOL], "tool_choice": {"function": "x"}}, 400, "no tool None"),
        (CHAT, {"messages": [], "chat_template_kwargs": {"add_generation_prompt": 1}}, 400, "without add_generation"),
        ("/v1/messages", {"messages": [], "max_tokens": 1, "thinking": {"budget_tokens": "x"}}, 400, "valid integer"),
        ("/v1/responses", _DEEP, 400, "deep"),
        ("/tokenize", {"content": 3}, 400, "prompt must be text"),
        ("/detokenize", {"tokens": ["x"]}, 400, "tokens.0"),
        ("/detokenize", {"tokens": [99999]}, 400, "99999"),
        ("/v1/embeddings", {}, 400, '"input" or "content"'),
        ("/v1/embeddings", {"input": []}, 400, "0 tokens"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int4"}, 400, "float or base64"),
        ("/v1/responses", {"input": [{"type": "computer"}]}, 400, "computer"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, 400, "web_search"),
        ("/v1/messages", {"messages": []}, 400, "max_tokens"),
        ("/rerank", {"query": "q"}, 400, '"documents"'),
        ("/slots/x?action=erase", {}, 400, "slot"),
        (f"/slots/{'9' * 5000}?action=erase", {}, 400, "slot"),
        ("/v1/activations", {"prompt": "x", "nodes": ["l_out-0"], "edits": [_EDIT]}, 400, "no prompt has a token 1000"),
        ("/no/such", {}, 404, "Not Found"),
    ],
)
def test_errors_are_named(client: TestClient, path: str, body: Any, code: int, says: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    r = client.post(path, content=data, headers={"content-type": "application/json"})
    error = r.json()["error"]
    assert r.status_code == code and says in error["message"], r.text
    if "messages" not in path:
        assert error["code"] == code and error["type"]


def test_numbers_that_no_float_holds(client: TestClient) -> None:
    """JSON has integers of any size. As a bias such a one is endless; as a time it never ends."""
    lines = [["\n", 10**400]]
    body = {"prompt": "x", "n_predict": 9, "ignore_eos": True, "logit_bias": lines, "t_max_predict_ms": 10**400}
    r = client.post(COMPLETION, json=body)
    assert r.status_code == 200 and r.json()["tokens_predicted"] == 9, r.text
    body["logit_bias"] = [["\n", 90]]
    r = client.post(COMPLETION, json=body)
    assert r.status_code == 200 and not r.json()["content"].strip(), r.text  # its tokens are a space and a new line


def _bodies(kind: type[Body]) -> Iterator[type[Body]]:
    for more in kind.__subclasses__():
        yield more
        yield from _bodies(more)


def test_a_list_of_wrong_items_is_one_error() -> None:
    """Of millions of wrong items, the errors of all would take a minute, and gigabytes."""
    n = 0
    for kind in _bodies(Body):
        for name in kind.model_fields:
            for item in (None, {"tokens": [None] * 1000}):
                with suppress(ValidationError):
                    kind.model_validate({name: [item] * 1000})
                    continue
                with pytest.raises(ValidationError) as e:
                    kind.model_validate({name: [item] * 1000})
                assert e.value.error_count() < 20, (kind, name)
                n += 1
    assert n > 100


@pytest.mark.parametrize("path", [COMPLETION, "/v1/completions", "/embedding"])
def test_texts_beyond_the_limit_are_not_read(client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """Nobody tokenizes millions of texts to find that they are too many."""
    monkeypatch.setattr(limits, "REQUEST_TEXTS", 2)
    many = ["x", "y", "z", {"no": "text"}]
    r = client.post(path, json={"prompt": many, "input": many})
    assert r.status_code == 400 and "1 to 2 texts, not 3" in r.json()["error"]["message"], r.text


def test_a_long_query_and_many_documents(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The query is read with each document: 8 MB with 2048 of them would be 16 GB."""
    monkeypatch.setattr(limits, "REQUEST_BYTES", 10_000)
    r = client.post("/rerank", json={"query": "x" * 2000, "documents": ["y"] * 6})
    assert r.status_code == 413 and "6 documents" in r.json()["error"]["message"], r.text
    r = client.post("/rerank", json={"query": "x" * 1000, "documents": ["y"] * 6})
    assert "no reranker" in r.json()["error"]["message"], r.text


@pytest.mark.parametrize(
    "body",
    [
        {"response_fields": [f"a{i}" for i in range(300)]},
        {"dry_sequence_breakers": [f"a{i}" for i in range(300)]},
        {"n": 9, "stop": [f"a{i}" for i in range(1000)]},
        {"prompt": ["a", "b"] * 9, "json_schema": {"enum": [f"a{i}" for i in range(1000)]}},
        {"n": 9, "grammar": 'root ::= "a"' + " " * 4000},
    ],
)
def test_options_that_each_answer_has(client: TestClient, monkeypatch: pytest.MonkeyPatch, body: Any) -> None:
    """What is read for each of up to 2048 texts may not be long."""
    assert client.post(COMPLETION, json={"prompt": "x", "n_predict": 1, "n": 9, "stop": ["y"]}).status_code == 200
    monkeypatch.setattr(limits, "REQUEST_BYTES", 30_000)
    r = client.post(COMPLETION, json={"prompt": "x", "n_predict": 1, **body})
    assert r.status_code == 400 and ("at most 256" in r.text or "30000 characters together" in r.text), r.text


@pytest.mark.parametrize("path", [COMPLETION, "/v1/completions"])
def test_prompts_are_spelled_beside_the_event_loop(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A thousand tokens for each of 2048 answers took seven seconds, in which nobody else was heard."""
    spell, texts, loops = gg.Model.detokenize, list[str](), list[asyncio.AbstractEventLoop]()

    def noted(*args: Any, **options: Any) -> str:
        with suppress(RuntimeError):  # there is none
            loops.append(asyncio.get_running_loop())
        texts.append(spell(*args, **options))
        return texts[-1]

    monkeypatch.setattr(gg.Model, "detokenize", noted)
    r = client.post(path, json={"prompt": [5] * 10, "n": 9, "max_tokens": 1})
    assert r.status_code == 200 and texts and not loops, r.text


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens", "/v1/messages"])
def test_items_become_messages_beside_the_event_loop(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """700,000 items took more than a second, in which nobody else was heard."""
    module: Any = anthropic if "messages" in path else responses
    chat, loops = module._chat, list[asyncio.AbstractEventLoop | None]()

    def noted(body: Any) -> Any:
        with suppress(RuntimeError):
            loops.append(asyncio.get_running_loop())
            return chat(body)
        loops.append(None)
        return chat(body)

    monkeypatch.setattr(module, "_chat", noted)
    said = [{"role": "user", "content": "x"}]
    r = client.post(path, json={"input": said, "messages": said, "max_tokens": 1, "max_output_tokens": 1})
    assert r.status_code == 200 and loops == [None], r.text


def test_pieces_of_many_tokens(client: TestClient) -> None:
    """An object for each token would take 300 bytes."""
    text = "á1" * 50_000
    tracemalloc.start()
    r = client.post("/tokenize", content=json.dumps({"content": text, "with_pieces": True}, ensure_ascii=False))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tokens = r.json()["tokens"]
    assert len(tokens) >= 100_000 and most < 150 * len(tokens) + (1 << 20)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_pictures_and_sound_are_refused_by_name(client: TestClient, kind: str) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind, kind: {}}]}]}
    r = client.post(CHAT, json=body)
    assert r.status_code == 400 and kind in r.json()["error"]["message"]


def test_methods_and_long_bodies(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.get(COMPLETION).status_code == 405
    monkeypatch.setattr(limits, "REQUEST_BYTES", 100)
    r = client.post(COMPLETION, json={"prompt": "x" * 100})
    assert r.status_code == 413 and "longer than 100 bytes" in r.json()["error"]["message"]
    error = client.post(COMPLETION, json={"prompt": [1] * 512}).json()["error"]
    assert error["code"] == 413


@pytest.mark.parametrize("path", ["/", "", COMPLETION, "/v1/messages", "/slots/", "/v1/stream"])
def test_a_query_that_is_no_utf8(client: TestClient, path: str) -> None:
    """Other servers of ASGI than ours hand on any bytes."""
    scope = {"type": "http", "method": "DELETE", "path": path, "raw_path": path.encode(), "query_string": b"a=\xe6"}
    sent = list[dict[str, Any]]()

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(client.app({**scope, "headers": [], "root_path": ""}, receive, send))  # pyright: ignore
    assert sent[0]["status"] in (404, 405, 501)


def test_a_long_prompt_tells_both_lengths(client: TestClient) -> None:
    error = client.post(COMPLETION, json={"prompt": [1] * 600}).json()["error"]
    assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", 600, 512)


def test_a_lone_surrogate_is_answered(client: TestClient) -> None:
    r = client.post(COMPLETION, content=b'{"prompt": "a\\ud800b", "n_predict": 1}')
    assert (
        r.status_code == 200
        and client.post("/apply-template", content=b'{"messages": [{"role": "user", "content": "\\ud800"}]}').json()[
            "prompt"
        ]
    )


def test_keys(tales: gg.Model, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("# of Ann\nann-key\n\n")
    options = ServeOptions(n_parallel=1, api_key="key-1,key-2", api_key_file=str(file))
    assert "key-1" not in repr(options.keys) + repr(options)
    body = {"prompt": "x", "n_predict": 1}
    with TestClient(create_app(tales, options)) as c:
        for key in ("key-1", "key-2", "ann-key"):
            assert c.post(COMPLETION, json=body, headers={"Authorization": f"Bearer {key}"}).status_code == 200
            assert c.get("/slots", headers={"X-Api-Key": key}).status_code == 200
        for header in ({}, {"Authorization": "Bearer key-3"}, {"Authorization": "key-1"}, {"X-Api-Key": "é"}):
            for ask in (lambda h: c.post(COMPLETION, json=body, headers=h), lambda h: c.get("/slots", headers=h)):
                r = ask({k: v.encode() for k, v in header.items()})
                assert r.status_code == 401 and r.json()["error"]["type"] == "authentication_error"
        for public in ("/health", "/v1/models", "/"):
            assert c.get(public).status_code == 200
        assert c.post("/slots/0?action=erase").status_code == c.post("/no/such").status_code == 401
    assert "key-1" not in caplog.text
    file.write_text("# nobody\n")
    with pytest.raises(ModelError, match="there is no key in it"):
        ServeOptions(api_key_file=str(file))


def test_numbers_that_json_lacks() -> None:
    """They are null, as llama-server's, not NaN, which no strict reader takes."""
    value = {"embedding": [math.nan, 1.5], "top": [{"logprob": -math.inf}], "ids": (1, True, None)}
    assert dumps(value) == b'{"embedding":[null,1.5],"top":[{"logprob":null}],"ids":[1,true,null]}'


def test_long_requests_are_prepared_in_turns(tales: gg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve of 16 MB at once took 3.4 GB, and held all others up for half a minute."""
    monkeypatch.setattr(limits, "PREPARED_BYTES", 200_000)
    monkeypatch.setattr(limits, "WAITING_BYTES", 250_000)
    spell, now, most = gg.Model.detokenize, list[int](), list[int]()
    waits, asked = threading.Event(), list[threading.Thread]()

    def slow(*args: Any, **options: Any) -> str:
        now.append(1)
        most.append(len(now))
        assert waits.wait(PATIENCE)
        now.pop()
        return spell(*args, **options)

    monkeypatch.setattr(gg.Model, "detokenize", slow)
    codes = list[int]()
    with TestClient(create_app(tales, ServeOptions(n_parallel=1))) as c:

        def ask() -> None:
            codes.append(c.post("/detokenize", json={"tokens": [5] * 60_000}).status_code)  # 120 kB

        for _ in range(4):
            asked.append(threading.Thread(target=ask))
            asked[-1].start()
        while 503 not in codes:  # one is being prepared, two wait, which is all that may
            time.sleep(0.01)
        assert c.post("/tokenize", json={"content": "a"}).status_code == 200  # a short one does not wait
        waits.set()
        for thread in asked:
            thread.join()
    assert sorted(codes) == [200, 200, 200, 503] and max(most) == 1


def test_turns_of_those_that_leave() -> None:
    async def run() -> None:
        turns, passed = Turns(), list[int]()

        async def wait(n: int) -> None:
            async with turns.turn(n):
                passed.append(n)
                await asyncio.sleep(0)

        async with turns.turn(limits.PREPARED_BYTES):
            tasks = [asyncio.ensure_future(wait(n)) for n in (5 << 20, 1 << 30, 3 << 20)]
            await asyncio.sleep(0)
            tasks[0].cancel()
            await asyncio.sleep(0)
        tasks[1].cancel()  # which was let through just now
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(wait(1 << 40), PATIENCE)
        assert passed == [3 << 20, 1 << 40]

    asyncio.run(run())


def test_turns_of_those_that_leave_together() -> None:
    """As the requests of a batch do that is cancelled: the one that has the turn, and those that wait."""

    async def check() -> None:
        turns = Turns()

        async def work(seconds: float) -> None:
            async with turns.turn(limits.PREPARED_BYTES):
                await asyncio.sleep(seconds)

        for n_left in (3, 2, 1):  # of three, the first ones leave
            tasks = [asyncio.ensure_future(work(60 if i < n_left else 0)) for i in range(3)]
            await asyncio.sleep(0)
            for task in tasks[:n_left]:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(e) for e in found] == [asyncio.CancelledError] * n_left + [type(None)] * (3 - n_left)
            await asyncio.wait_for(work(0), 30)

    asyncio.run(check())


def test_a_long_answer_is_written_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one call of `json.dumps` writes 18 MB, nobody else has a turn."""
    parts = list[bytes]()
    monkeypatch.setattr(long_json, "dumps", lambda value: parts.append(dumps(value)) or parts[-1])  # pyright: ignore
    top = [{"id": i, "token": "é", "bytes": [195, 169], "logprob": -math.inf} for i in range(3000)]
    value = {"probs": [{"top": top, "id": i} for i in range(3)], "ids": list(range(100_000)), "none": [], "n": {}}
    assert _answered(value) == dumps(value) and max(map(len, parts)) < 40_000
    rows = np.arange(60_000, dtype=np.float32).reshape(300, 200)
    want = dumps([{"embedding": rows.tolist()}, {"embedding": rows[1].tolist()}])
    assert _answered([{"embedding": rows}, {"embedding": rows[1]}]) == want and max(map(len, parts)) < 40_000


def _answered(value: Any) -> bytes:
    """The body of an answer in JSON, which comes in pieces."""
    sent = list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def run() -> None:
        made = await long_json.long_json(value)
        await made({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)

    asyncio.run(run())
    body = b"".join(m.get("body", b"") for m in sent)
    assert dict(sent[0]["headers"])[b"content-length"] == str(len(body)).encode()
    assert len(sent) > 2 and max(len(m.get("body", b"")) for m in sent) < 400_000
    return body


def test_vectors_of_very_many_tokens(tales: gg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 texts of 200 tokens, in a request of 1 MB, were an answer of 570 MB, and 36 seconds for all others."""
    monkeypatch.setattr(limits, "REQUEST_NUMBERS", 9 * tales.hparams.n_embd)
    with TestClient(create_app(tales, ServeOptions(pooling="none"))) as c:
        assert c.post("/embeddings", json={"input": [[1] * 5, [1] * 4]}).status_code == 200
        r = c.post("/embeddings", json={"input": [[1] * 5, [1] * 5]})
        assert r.status_code == 413 and "fewer or shorter texts" in r.text


def test_log_probabilities_hold_up_nobody() -> None:
    """Those of all tokens that were there were written in one turn: 18 MB of them took ten seconds."""
    token, turns = Token("x", 5, top=((5, -1.0),)), list[int]()

    async def read() -> None:
        answering = Answering([cast(Generation, None)], EngineThread(None, 0))
        answering.take([(0, token)] * 50)
        answering.take([(0, None)])
        other = asyncio.ensure_future(count())
        async for _ in answering:
            pass
        other.cancel()

    async def count() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    asyncio.run(read())
    assert len(turns) >= 49


def test_many_log_probabilities(tales: gg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one answer are kept in memory until it is sent: it has a bound, of all its texts together."""
    monkeypatch.setattr(limits, "REQUEST_PROBS", 60)
    with TestClient(create_app(tales, ServeOptions(n_parallel=2, n_ctx=256))) as c:
        for path, more in ((COMPLETION, {"n_probs": 5}), ("/v1/completions", {"logprobs": 5})):
            body = {"prompt": "a", "n": 3, "max_tokens": 4, "ignore_eos": True, **more}
            assert c.post(path, json=body).status_code == 200
            r = c.post(path, json={**body, "max_tokens": 5})
            assert r.status_code == 400 and "at most 60 log-probabilities" in r.text
            assert "at most 60 log-probabilities" in c.post(path, json={**body, "max_tokens": 5, "stream": True}).text
        assert all(not slot["is_processing"] for slot in c.get("/slots").json())


@pytest.mark.parametrize(("prefix", "mounted"), [("", ""), ("/ai", ""), ("", "/below")])
def test_no_way_around_keys(tales: gg.Model, tmp_path: Path, prefix: str, mounted: str) -> None:
    """A path that the router takes for an endpoint's needs a key: with a line feed at its end, escaped, below a prefix,
    and where the application is a part of another one."""
    folders = {"slot_save_path": str(tmp_path), "batches_dir": str(tmp_path)}
    options = ServeOptions(n_parallel=1, api_key="key", metrics=True, api_prefix=prefix, **folders)
    with TestClient(create_app(tales, options), root_path=mounted) as c:
        paths = ("/slots", "/metrics", "/props", "/lora-adapters", "/v1/files", "/v1/files/file-0", "/v1/batches")
        for path in (*paths, "/v1/batches/batch-0", "/v1/files/file-0/content"):
            for way in (path, path + "%0A", path.replace("/s", "/%73")):
                at = mounted + prefix + way
                assert c.get(at).status_code == c.head(at).status_code == 401, at
                assert c.get(at, headers={"X-Api-Key": "key"}).status_code != 401
        for public in ("/health", "/v1/models", "/v1/models/tales-Q8_0.gguf", "/"):
            assert c.get(mounted + prefix + public).status_code == 200


def test_pages_of_other_origins(tales: gg.Model) -> None:
    def allowed(options: ServeOptions, origin: str) -> str | None:
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        with TestClient(create_app(tales, options)) as c:
            return c.options(COMPLETION, headers=headers).headers.get("access-control-allow-origin")

    assert allowed(ServeOptions(n_parallel=1), "http://x.org") == "*"
    local = ServeOptions(n_parallel=1, cors_origins="localhost", api_key="k")
    assert allowed(local, "http://localhost:99") == "http://localhost:99" and allowed(local, "http://x.org") is None


def test_what_pages_send_without_asking(tales: gg.Model) -> None:
    """A browser sends texts and forms to any server, and a page may give its own name this machine's address: DNS
    rebinding, as in CVE-2024-28224."""
    with TestClient(create_app(tales, ServeOptions(n_parallel=1, cors_origins="localhost, https://a.org"))) as c:

        def status(host: str, origin: str | None = None) -> int:
            headers = {"Host": host} if origin is None else {"Host": host, "Origin": origin}
            got = [c.get("/slots", headers=headers), c.post("/tokenize", content="{}", headers=headers)]
            assert got[0].status_code == got[1].status_code
            return got[0].status_code

        for host in ("127.0.0.1:8080", "[::1]:80", "LOCALHOST", "a.org:443", "192.168.0.7"):
            assert status(host) == status(host, f"http://{host}") == 200, host
            assert status(host, "http://localhost:3") == status(host, "https://a.org") == 200
            assert status(host, "null") == status(host, "http://b.org") == status(host, "http://a.org:1") == 403
        for host in ("b.org", "localhost.b.org:80", "[", "a.org.b:80", "1.2.3"):
            assert status(host) == status(host, f"http://{host}") == 403, host
    with TestClient(create_app(tales, ServeOptions(n_parallel=1))) as c:
        assert c.get("/slots", headers={"Host": "b.org", "Origin": "http://b.org"}).status_code == 200


def test_a_prefix_and_files(tales: gg.Model, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("mine")
    with TestClient(create_app(tales, ServeOptions(n_parallel=1, api_prefix="/ai", path=str(tmp_path)))) as c:
        assert c.get("/ai/health").status_code == 200 and c.get("/health").status_code == 404
        assert c.get("/ai/").text == "mine"
        assert c.get("/ai/../../etc/passwd").status_code == 404


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pooling": "best"}, "pooling must be one of"),
        ({"api_prefix": "v1"}, "must begin with /"),
        ({"slot_save_path": "/no/such"}, "there is no folder"),
        ({"chat_template_kwargs": "{"}, "no JSON"),
        ({"chat_template_kwargs": "[]"}, "must be a JSON object"),
        ({"n_ctx": 3}, "slots have no room"),
        ({"path": "/no/such"}, "there is no folder"),
        ({"chat_template": "nonsense"}, "unknown chat template"),
    ],
)
def test_options_that_make_no_sense(tales: gg.Model, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        create_app(tales, ServeOptions(**options))


# -- the engine's thread ----------------------------------------------------------------------------------------------


def test_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing pyggml imports nothing of it; an error names it when it is missing."""
    modules = ("starlette", "uvicorn", "pydantic")
    code = f"import sys, pyggml, pyggml.tools.serve; assert not set(sys.modules) & {set(modules)}"
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in [n for n in sys.modules if n.startswith("pyggml.serve.app")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(ModelError, match=r"starlette.*: pip install pyggml\[serve\]"):
        create_app()


def in_app(
    tales: gg.Model, options: ServeOptions, test: Callable[[httpx.AsyncClient, EngineThread], Coroutine[Any, Any, None]]
) -> None:
    """Run a test beside an application, in one event loop."""

    async def run() -> None:
        app = create_app(tales, options)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=30) as c:
                await test(c, app.state.service.thread)

    asyncio.run(run())


def test_too_many_wait(tales: gg.Model) -> None:
    async def test(c: httpx.AsyncClient, thread: EngineThread) -> None:
        gate, body = threading.Event(), {"prompt": "x", "n_predict": 6, "temperature": 0}
        held = asyncio.ensure_future(thread.call(lambda: gate.wait(9)))
        asked = [asyncio.ensure_future(c.post(COMPLETION, json=body)) for _ in range(6)]
        while sum(a.done() for a in asked) < 3:
            await asyncio.sleep(0.001)
        gate.set()
        await held
        answers = await asyncio.gather(*asked)
        codes = sorted(r.status_code for r in answers)
        assert codes == [200, 200, 200, 503, 503, 503]
        refused = next(r for r in answers if r.status_code == 503)
        assert refused.headers["retry-after"] == "1" and refused.json()["error"]["type"] == "unavailable_error"
        assert (await c.post(COMPLETION, json={**body, "n_predict": 1})).status_code == 200

    in_app(tales, ServeOptions(n_parallel=1, n_queue=2, context={"n_threads": 1}), test)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["waiting", "prompt", "tokens"])
def test_a_client_that_leaves_frees_its_slot(tales: gg.Model, stream: bool, when: str) -> None:
    """In each phase; the texts of others are as before."""

    async def test(c: httpx.AsyncClient, thread: EngineThread) -> None:
        engine = thread.engine
        assert thread.ctx is not None and engine is not None
        decode = thread.ctx.decode
        short = {"prompt": "A dog", "n_predict": 4, "temperature": 0}
        alone = (await c.post(COMPLETION, json=short)).json()["content"]
        long = {"prompt": "Once", "n_predict": 500, "ignore_eos": True, "stream": stream}
        with pytest.MonkeyPatch.context() as patch:  # a slower model
            patch.setattr(thread.ctx, "decode", lambda batch: (time.sleep(0.002), decode(batch)))  # pyright: ignore
            asked = [asyncio.ensure_future(c.post(COMPLETION, json=long)) for _ in range(1 + (when == "waiting"))]
            while not (engine.slots and engine.slots[0].generation.n_predict == 500):
                await asyncio.sleep(0.001)
            while when == "tokens" and len(engine.slots[0].generation.ids) < 3:
                await asyncio.sleep(0.001)
            g = engine.slots[0].generation
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            assert (await c.post(COMPLETION, json=short)).json()["content"] == alone
        assert g.finish_reason is None and len(g.ids) < 400 and thread.n_waiting == 0

    in_app(tales, ServeOptions(n_parallel=1, context={"n_threads": 1}), test)


def test_who_reads_slowly_holds_up_nobody(tales: gg.Model) -> None:
    async def test(c: httpx.AsyncClient, thread: EngineThread) -> None:
        assert thread.ctx is not None
        text = TextRequest([1, 2], TextParams(n_predict=100, ignore_eos=True))
        slow = thread.submit([text.start(thread.ctx, 200)])
        fast = (await c.post(COMPLETION, json={"prompt": "A dog", "n_predict": 100, "temperature": 0})).json()
        assert fast["stop"]
        assert len([token async for _, token in slow]) == 100  # they wait for it

    in_app(tales, ServeOptions(n_parallel=2, context={"n_threads": 1}), test)


def test_a_batch_that_fails_ends_its_texts_alone(tales: gg.Model) -> None:
    async def test(c: httpx.AsyncClient, thread: EngineThread) -> None:
        assert thread.ctx is not None

        def fails(batch: Any) -> None:
            raise gg.BackendError("the backend broke")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(thread.ctx, "decode", fails)
            r = await c.post(COMPLETION, json={"prompt": "x", "n_predict": 4})
            assert r.status_code == 500 and r.json()["error"]["message"] == "the backend broke"
            streamed = await c.post(CHAT, json={"messages": [{"role": "user", "content": "x"}], "stream": True})
            assert "the backend broke" in streamed.text
        assert (await c.post(COMPLETION, json={"prompt": "x", "n_predict": 4})).status_code == 200

    in_app(tales, ServeOptions(n_parallel=2, context={"n_threads": 1}), test)


def test_a_thread_that_ends_leaves_nobody_waiting(tales: gg.Model) -> None:
    """By an error of its own, too."""

    async def test(c: httpx.AsyncClient, thread: EngineThread) -> None:
        body = {"prompt": "x", "n_predict": 400, "ignore_eos": True}
        asked = asyncio.ensure_future(c.post(COMPLETION, json=body))
        await asyncio.sleep(0.01)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "excepthook", lambda _: None)
            patch.setattr(thread, "_do_job", lambda: 1 / 0)
            r = await asked
            assert r.status_code == 503 and "stopping" in r.json()["error"]["message"]
            for path in ("/health", "/slots"):
                assert (await c.get(path)).status_code == 503
            assert (await c.post(COMPLETION, json=body)).status_code == 503
            thread.stop()  # its error has come to nobody when the patch ends

    in_app(tales, ServeOptions(n_parallel=1, context={"n_threads": 1}), test)


def test_what_is_cut_while_it_is_computed(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault, and may be asked again: batches do that by themselves."""

    def embed(*args: Any, **options: Any) -> Any:
        raise Aborted("mul_mat: aborted")

    monkeypatch.setattr(gg.Model, "embed", embed)
    r = client.post("/v1/embeddings", json={"input": "x"})
    assert r.status_code == 503 and "stopping" in r.json()["error"]["message"], r.text


def test_many_jobs_hold_up_no_text(tales: gg.Model) -> None:
    """What is computed beside texts (embeddings, activations) has its turn between two tokens, one at a time."""

    async def test(c: httpx.AsyncClient, thread: EngineThread) -> None:
        n_tokens = list[int]()

        def job() -> None:
            time.sleep(0.01)
            n_tokens.append(sum(len(slot.generation.ids) for slot in thread.engine.slots) if thread.engine else 0)

        text = asyncio.ensure_future(c.post(COMPLETION, json={"prompt": "x", "n_predict": 99, "ignore_eos": True}))
        while not thread.engine or not any(not slot.ended for slot in thread.engine.slots):
            await asyncio.sleep(0.001)
        await asyncio.gather(*[thread.call(job) for _ in range(20)])
        assert len(set(n_tokens)) == 20 and (await text).status_code == 200

    in_app(tales, ServeOptions(n_parallel=1, context={"n_threads": 1}), test)


def test_signs_of_life(tales: gg.Model) -> None:
    """A stream that is silent for a while sends comments."""

    async def test(c: httpx.AsyncClient, thread: EngineThread) -> None:
        gate = threading.Event()
        held = asyncio.ensure_future(thread.call(lambda: gate.wait(5)))
        asked = asyncio.ensure_future(c.post(COMPLETION, json={"prompt": "x", "n_predict": 2, "stream": True}))
        await asyncio.sleep(1.2)
        gate.set()
        await held
        assert (await asked).text.startswith(":\n\n")

    in_app(tales, ServeOptions(n_parallel=1, sse_ping_interval=1), test)


@pytest.mark.parametrize("n_clients", [1, 4, 16])
def test_a_text_does_not_depend_on_its_slot(client: TestClient, tales: gg.Model, n_clients: int) -> None:
    """Greedy and seeded. What is evaluated together is rounded alike only where kernels do not depend on the batch
    (issue 33); these prompts are far from ties, which hides what is left."""
    prompts = ["Once upon a time", "The king said", "A fox went out", "There lived a"]
    asked = [
        {"prompt": p, "n_predict": 12, "temperature": t, "seed": 3, "cache_prompt": cache}
        for p in prompts
        for t in (0, 0.7)
        for cache in (True, False)
    ]

    def text(body: dict[str, Any]) -> str:
        return client.post(COMPLETION, json=body).json()["content"]

    alone = [text({**body, "cache_prompt": False}) for body in asked]
    order = random.Random(n_clients).sample(range(len(asked)), len(asked))
    with ThreadPoolExecutor(n_clients) as pool:
        got = dict(zip(order, pool.map(text, [asked[i] for i in order]), strict=True))
    assert [got[i] for i in range(len(asked))] == alone
