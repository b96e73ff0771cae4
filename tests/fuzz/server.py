"""Requests: through the ASGI application in this process, and as bytes on a connection."""

# ruff: noqa: E501  (seeds are shown as they are)

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from starlette.applications import Starlette

from pyggml.serve import ServeOptions, create_app
from pyggml.serve.app import _BOTH, _GET, _POST

from .changes import change_bytes, change_json
from .harness import folder, harness, small_model

_CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
BODIES: dict[str, Any] = {
    "/v1/chat/completions": {
        **_CHAT, "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "n": 1, "logprobs": True, "top_logprobs": 2, "seed": 1,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], "logit_bias": {"3": 1},
    },
    "/v1/chat/completions?": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b", "reasoning_content": ""}], "max_tokens": 1,
        "continue_final_message": True, "add_generation_prompt": False, "thinking_budget_tokens": 1, "reasoning_control": True,
    },
    "/chat/completions": {**_CHAT, "stream": True, "stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": ["a", [1, 2]], "max_tokens": 2, "echo": True, "suffix": "b", "logprobs": 1},
    "/completion": {"prompt": "a", "n_predict": 2, "samplers": ["top_k", "temperature"], "mirostat": 2, "n_probs": 2, "dry_multiplier": 1}
    | {"grammar": 'root ::= "a" | "b"', "cache_prompt": True, "id_slot": 0, "return_tokens": True},
    "/completions": {"prompt": {"prompt_string": "a", "multimodal_data": ["eA=="]}, "n_predict": 1, "json_schema": {"type": "integer"}},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "x", "filename": "y"}], "n_predict": 1},
    "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "max_output_tokens": 2},
    "/v1/messages": {**_CHAT, "system": "s", "tools": [{"name": "f", "input_schema": {"type": "object"}}], "stop_sequences": ["q"]},
    "/v1/messages/count_tokens": _CHAT,
    "/v1/embeddings": {"input": ["a", [1]], "encoding_format": "base64"},
    "/embedding": {"content": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"], "top_n": 1},
    "/tokenize": {"content": ["a", 3], "add_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [1, 2, 300]},
    "/apply-template": _CHAT,
    "/v1/activations": {"prompt": "a", "nodes": ["l_out*"]},
    "/v1/inside": {"prompt": "ab", "nodes": ["*"]},
    "/lora-adapters": [{"id": 0, "scale": 1.0}],
    "/slots/0?action=save": {"filename": "a"},
    "/props": {},
}  # fmt: skip


def _requests() -> Iterable[bytes]:
    for path, body in BODIES.items():
        yield f"POST {path}\ncontent-type: application/json\n\n".encode() + json.dumps(body).encode()
    yield b"GET /slots?fail_on_no_slot=1\naccept: text/html\n\n"
    yield b"GET /../../etc/passwd\nauthorization: Bearer x\norigin: http://a\n\n"
    form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n--b--\r\n'
    yield b"POST /v1/audio/transcriptions\ncontent-type: multipart/form-data; boundary=b\n\n" + form


WORDS = " ".join(
    [*_GET, *_POST, *_BOTH, "stream response_format tool_choice image_url data:image/png;base64, transfer-encoding:"]
)


def _change(rng: Any, data: bytes) -> bytes:
    head, between, body = data.partition(b"\n\n")
    return (
        head + between + change_json(rng, body)
        if rng.integers(5)
        else change_bytes(rng, data, tuple(WORDS.encode().split()))
    )


@cache
def _app() -> Starlette:
    (folder() / "slots").mkdir()
    return create_app(
        small_model(),
        ServeOptions(
            n_ctx=64,
            n_parallel=2,
            metrics=True,
            props=True,
            slot_save_path=str(folder() / "slots"),
            context={"n_threads": 1},
        ),
    )


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


async def _ask(scope: dict[str, Any], body: bytes) -> tuple[int, bytes]:
    status, parts, sent = 0, list[bytes](), False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            assert status == 0
            status = message["status"]
        else:
            parts.append(message.get("body", b""))

    await asyncio.wait_for(_app()(scope, receive, send), 30)
    return status, b"".join(parts)


@harness("pyggml.serve", "pyggml.llm.openai", seeds=_requests, allowed=(), words=WORDS, change=_change, seconds=10.0)
def http(data: bytes) -> None:
    """A request: method and path, a header a line, an empty line, the body. Its answer is one that the client is to
    blame for, or none is."""
    head, _, body = data.partition(b"\n\n")
    first, *lines = head.split(b"\n")
    method, _, target = first.partition(b" ")
    path, _, query = target.partition(b"?")
    headers = [(k.strip().lower(), v.strip()) for k, _, v in (line.partition(b":") for line in lines)]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method.decode("latin-1"), "scheme": "http",
        "path": path.decode("utf-8", "replace"), "raw_path": path, "query_string": query, "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    status, answer = _loop().run_until_complete(_ask(scope, body))
    assert 200 <= status < 500 or status in (501, 503), (status, answer[:500])
    if status >= 400 and answer.startswith(b"{"):
        assert json.loads(answer)
