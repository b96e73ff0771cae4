"""Requests: through the ASGI application in this process, and as bytes on a connection."""

# ruff: noqa: E501  (seeds are shown as they are)

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from starlette.applications import Starlette

from pyggml.llm.model import load_model
from pyggml.llm.samplers.params import TextParams
from pyggml.serve import ServeOptions, create_app
from pyggml.serve.app import _BOTH, _GET, _POST

from ..tiny_model import write_gguf
from .changes import change_bytes, change_json
from .harness import SMALL, folder, harness, put_file

_CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
_TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_PNG = "data:image/png;base64,iVBORw0KGgo="
_TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "r"},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
    {"role": "user", "content": "c"},
]
_SAMPLED = {
    "temperature": 0.7,
    "dynatemp_range": 0.1,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.9,
    "top_n_sigma": 1.0,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.1,
    "repeat_penalty": 1.1,
    "repeat_last_n": 8,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "dry_multiplier": 1.0,
    "dry_sequence_breakers": ["a"],
    "mirostat": 2,
    "mirostat_tau": 5.0,
    "seed": 7,
    "min_keep": 1,
    "n_probs": 2,
    "logit_bias": [[3, 1.5], ["a", False]],
    "samplers": ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    "ignore_eos": True,
    "n_keep": 1,
    "t_max_predict_ms": 1000,
}
BODIES: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        {**_CHAT, "temperature": 0.5, "top_p": 0.9, "stop": ["x"], "n": 1, "logprobs": True, "top_logprobs": 2, "seed": 1, "tools": [_TOOL], "logit_bias": {"3": 1}},
        {"messages": _TURNS, "max_completion_tokens": 1, "tools": [_TOOL], "tool_choice": "auto", "parallel_tool_calls": False, "reasoning_format": "deepseek"},
        {**_CHAT, "tools": [_TOOL], "tool_choice": "required", "stream": True},
        {**_CHAT, "tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {**_CHAT, "functions": [_TOOL["function"]], "function_call": {"name": "f"}},
        {**_CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}, "strict": True}}},
        {**_CHAT, "response_format": {"type": "json_object"}, "stream": True},
        {**_CHAT, "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "n": 2, "return_progress": True, "timings_per_token": True},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": _PNG}}, {"type": "input_audio", "input_audio": {"data": "eA==", "format": "wav"}}]}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b", "reasoning_content": ""}], "max_tokens": 1,
         "continue_final_message": True, "add_generation_prompt": False, "thinking_budget_tokens": 1, "reasoning_control": True},
    ],
    "/v1/chat/completions/control": [{"id": "chatcmpl-x", "action": "stop_thinking"}],
    "/v1/chat/completions/input_tokens": [{"messages": _TURNS, "tools": [_TOOL]}],
    "/chat/completions": [{**_CHAT, "stream": True, "stream_options": {"include_usage": True}, "logprobs": True}],
    "/v1/completions": [
        {"prompt": ["a", [1, 2]], "max_tokens": 2, "echo": True, "suffix": "b", "logprobs": 1},
        {"prompt": "a", "max_tokens": 2, "n": 2, "best_of": 2, "stop": "b"},
        {"prompt": [1, 2, 3], "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}, "logprobs": 2},
    ],
    "/completion": [
        {"prompt": "a", "n_predict": 2, "samplers": ["top_k", "temperature"], "mirostat": 2, "n_probs": 2, "dry_multiplier": 1}
        | {"grammar": 'root ::= "a" | "b"', "cache_prompt": True, "id_slot": 0, "return_tokens": True},
        {"prompt": [1, "a", 2], "n_predict": 2, "stream": True, "post_sampling_probs": True, "response_fields": ["content", "generation_settings/n_predict"], **_SAMPLED},
        {"prompt": ["a", {"prompt_string": "b"}], "n_predict": 1, "lora": [{"id": 0, "scale": 0.5}], "n_indent": 2, "grammar_lazy": True, "grammar_triggers": [{"type": 1, "value": "a"}]},
    ],
    "/completions": [{"prompt": {"prompt_string": "a", "multimodal_data": ["eA=="]}, "n_predict": 1, "json_schema": {"type": "integer"}}],
    "/infill": [{"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "x", "filename": "y"}], "n_predict": 1}],
    "/v1/responses": [
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "max_output_tokens": 2},
        {"input": [
            {"type": "message", "role": "user", "content": "a"}, {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "x"}, {"type": "refusal", "refusal": "y"}]},
            {"role": "user", "content": "b"}],
         "instructions": "i", "stream": True, "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "tool_choice": "auto", "max_output_tokens": 2},
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "boolean"}}}, "reasoning": {"effort": "low"}, "max_output_tokens": 2},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": _PNG}]}], "tool_choice": {"type": "function", "name": "f"}},
    ],
    "/v1/responses/input_tokens": [{"input": "a"}],
    "/v1/messages": [
        {**_CHAT, "system": "s", "tools": [{"name": "f", "input_schema": {"type": "object"}}], "stop_sequences": ["q"]},
        {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, {"type": "redacted_thinking"}, {"type": "text", "text": "x"}, {"type": "tool_use", "id": "u", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u", "content": [{"type": "text", "text": "2"}]}, {"type": "text", "text": "b"}]}],
         "max_tokens": 2, "stream": True, "system": [{"type": "text", "text": "s"}], "tools": [{"name": "f", "input_schema": {"type": "object"}}],
         "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "thinking": {"type": "enabled", "budget_tokens": 1}},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}]}], "max_tokens": 1,
         "tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "f"}},
    ],
    "/v1/messages/count_tokens": [_CHAT],
    "/v1/embeddings": [{"input": ["a", [1]], "encoding_format": "base64", "dimensions": 8}, {"input": "a", "model": "m"}],
    "/embedding": [{"content": "a"}, {"content": ["a", [1, 2]], "embd_normalize": -1}],
    "/v1/rerank": [{"query": "a", "documents": ["b", "c"], "top_n": 1}],
    "/v2/rerank": [{"query": "a", "documents": [{"text": "b"}], "return_documents": True}],
    "/tokenize": [{"content": ["a", 3], "add_special": True, "with_pieces": True}],
    "/detokenize": [{"tokens": [1, 2, 300]}],
    "/apply-template": [{"messages": _TURNS, "tools": [_TOOL]}],
    "/v1/activations": [{"prompt": "a", "nodes": ["l_out*"]}],
    "/v1/inside": [{"prompt": "ab", "nodes": ["*"]}],
    "/lora-adapters": [[{"id": 0, "scale": 1.0}]],
    "/slots/0?action=save": [{"filename": "a"}],
    "/slots/0?action=restore": [{"filename": "a"}],
    "/slots/1?action=erase": [{}],
    "/props": [{}],
    "/v1/batches": [{"input_file_id": "file-" + "0" * 32, "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}}],
    "/v1/batches/batch-00000000000000000000000000000000/cancel": [{}],
}  # fmt: skip
_FILE = "file-" + "0" * 32
_MOST_FILES = 60  # in the folder of batches, before those that requests have made are taken away
_LINE = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}


def _requests() -> Iterable[bytes]:
    for path, bodies in BODIES.items():
        for body in bodies:
            yield f"POST {path}\ncontent-type: application/json\n\n".encode() + json.dumps(body).encode()
    for path in (*_GET, *_BOTH, "/v1/files", "/v1/batches", "/v1/files/file-00000000000000000000000000000000/content"):
        yield f"GET {path}\n\n".encode()
    part = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    named = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.%s"\r\n\r\n%s\r\n--b--\r\n'
    lines = part % (b"purpose", b"batch") + named % (b"jsonl", json.dumps(_LINE).encode() + b"\n{}\n[1]\n")
    yield b"POST /v1/files\ncontent-type: multipart/form-data; boundary=b\n\n" + lines
    spoken = part % (b"response_format", b"verbose_json") + part % (b"temperature", b"0.5") + named % (b"wav", b"RIFF")
    yield b"POST /v1/audio/transcriptions\ncontent-type: multipart/form-data; boundary=b\n\n" + spoken
    yield b"GET /slots?fail_on_no_slot=1\naccept: text/html\n\n"
    yield b"GET /../../etc/passwd\nauthorization: Bearer x\norigin: http://a\n\n"


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


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}{{ tools | tojson }}<assistant>"
)


@cache
def _app() -> Starlette:
    for name in ("slots", "batches"):
        (folder() / name).mkdir()
    about = {
        "id": _FILE,
        "object": "file",
        "bytes": 9,
        "created_at": 1,
        "filename": "a",
        "purpose": "batch",
        "status": "processed",
    }
    put_file(f"batches/{_FILE}.json", json.dumps(about).encode())
    put_file(f"batches/{_FILE}.jsonl", json.dumps(_LINE).encode() + b"\n")
    keys = {**SMALL, **{f"tokenizer.ggml.fim_{part}_token_id": 40 + i for i, part in enumerate(("pre", "suf", "mid"))}}
    model = load_model(write_gguf(folder() / "served.gguf", {**keys, "llama.context_length": 2048}))
    return create_app(
        model,
        ServeOptions(
            n_ctx=1024,
            defaults=TextParams(n_predict=4),
            n_parallel=2,
            metrics=True,
            props=True,
            slot_save_path=str(folder() / "slots"),
            batches_dir=str(folder() / "batches"),
            chat_template=TEMPLATE,
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

    await asyncio.wait_for(_app()(scope, receive, send), 120)
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
    if len(files := list((folder() / "batches").glob("*"))) > _MOST_FILES:
        for path in files:
            if path.stem != _FILE:
                path.unlink()
    status, answer = _loop().run_until_complete(_ask(scope, body))
    assert 200 <= status < 500 or status in (501, 503), (status, answer[:500])
    if status >= 400 and answer.startswith(b"{"):
        assert json.loads(answer)
