"""OpenAI's endpoints, in this process; the openai package is in test_clients.py."""

from __future__ import annotations

import base64
import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import pyggml as gg
from pyggml.serve import ServeOptions, create_app
from pyggml.serve.anthropic import _messages  # pyright: ignore[reportPrivateUsage]

from ..random_model import random_weights, write_random
from .conftest import events

HI = [{"role": "user", "content": "Tell me of a fox."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"enum": ["Ulm", "Rom"]}}, "required": ["city"]},
        },
    }
    for name in ("weather", "mayor")
]


def chat(client: TestClient, **body: Any) -> Any:
    r = client.post("/v1/chat/completions", json={"messages": HI, "max_tokens": 8, "temperature": 0, **body})
    assert r.status_code == 200, r.text
    return [json.loads(e) for e in events(r.text) if e != "[DONE]"] if body.get("stream") else r.json()


def test_a_chat_is_what_the_model_answers(client: TestClient, tales: gg.Model) -> None:
    got = chat(client)
    want: Any = tales.create_chat_completion(HI, max_tokens=8, temperature=0.0)
    assert got["choices"] == want["choices"] and got["object"] == "chat.completion" and got["model"] == "tales"
    assert got["usage"].items() >= want["usage"].items() and got["system_fingerprint"].startswith("pyggml")
    prompt = client.post("/apply-template", json={"messages": HI}).json()["prompt"]
    assert HI[0]["content"] in prompt and prompt.endswith("assistant\n")


def test_a_chat_in_parts(client: TestClient) -> None:
    parts = chat(client, stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=1)
    whole = chat(client, logprobs=True, top_logprobs=1)
    deltas = [p["choices"][0] for p in parts if p["choices"]]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""} and deltas[-1]["finish_reason"] == "length"
    assert "".join(d["delta"].get("content", "") for d in deltas) == whole["choices"][0]["message"]["content"]
    shown = [x for d in deltas if d["logprobs"] for x in d["logprobs"]["content"]]
    assert [x["token"] for x in shown] == [x["token"] for x in whole["choices"][0]["logprobs"]["content"]]
    assert parts[-1]["choices"] == [] and parts[-1]["usage"]["completion_tokens"] == 8
    assert parts[-1]["timings"]["predicted_n"] == 8 and "system_fingerprint" in parts[-1]
    r = client.post("/v1/chat/completions", json={"messages": HI, "top_logprobs": 2})
    assert r.status_code == 400 and "requires logprobs" in r.json()["error"]["message"]
    assert len({p["id"] for p in parts}) == 1


def test_several_answers(client: TestClient) -> None:
    got = chat(client, n=3, temperature=1.5, seed=5)
    texts = [c["message"]["content"] for c in got["choices"]]
    assert [c["index"] for c in got["choices"]] == [0, 1, 2] and len(set(texts)) == 3
    assert got["usage"]["completion_tokens"] == 24
    parts = chat(client, n=3, temperature=1.5, seed=5, stream=True)
    joined = ["", "", ""]
    for p in parts:
        choice = p["choices"][0]
        joined[choice["index"]] += choice["delta"].get("content", "")
    assert joined == texts


def test_tools(client: TestClient) -> None:
    got = chat(client, tools=TOOLS, tool_choice="required", max_tokens=60, frequency_penalty=9)["choices"][0]
    (call,) = got["message"]["tool_calls"]
    assert got["finish_reason"] == "tool_calls" and call["function"]["name"] in ("weather", "mayor")
    assert json.loads(call["function"]["arguments"])["city"] in ("Ulm", "Rom")
    named = {"type": "function", "function": {"name": "mayor"}}
    parts = chat(client, tools=TOOLS, tool_choice=named, max_tokens=60, frequency_penalty=9, stream=True)
    calls = calls_of(parts)
    assert [c["function"]["name"] for c in calls] == ["mayor"] and calls[0]["index"] == 0
    assert chat(client, tools=TOOLS, tool_choice="none")["choices"][0]["message"].keys() == {"role", "content"}


def test_calls_in_parallel(tales: gg.Model) -> None:
    """As a model would write them: a grammar makes it."""
    calls = [{"name": n, "arguments": {"city": "Ulm"}} for n in ("weather", "mayor")]
    said = "\n".join(f"<tool_call>\n{json.dumps(c)}\n</tool_call>" for c in calls)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>{{ tools and '' }}"
    with TestClient(create_app(tales, ServeOptions(n_parallel=1, chat_template=template))) as c:
        grammar = f"root ::= {json.dumps(said)}"
        got = chat(c, tools=TOOLS, grammar=grammar, max_tokens=200)["choices"][0]
        parts = chat(c, tools=TOOLS, grammar=grammar, max_tokens=200, stream=True)
        one = chat(c, tools=TOOLS, grammar=grammar, max_tokens=200, parallel_tool_calls=False)["choices"][0]
        one_streamed = chat(c, tools=TOOLS, grammar=grammar, max_tokens=200, parallel_tool_calls=False, stream=True)
        n = len(tales.tokenize(said[: said.index("Ulm")], False))
        cut = chat(c, tools=TOOLS, grammar=grammar, max_tokens=n, stream=True)
    made = got["message"]["tool_calls"]
    assert [c["function"]["name"] for c in made] == ["weather", "mayor"] and got["finish_reason"] == "tool_calls"
    streamed = calls_of(parts)
    assert [(c["index"], c["function"]) for c in streamed] == [(c["index"], c["function"]) for c in made]
    n_parts = sum(len(p["choices"][0]["delta"].get("tool_calls", ())) for p in parts)
    assert n_parts > 4 and all(set(c) == {"index", "id", "type", "function"} for c in streamed)
    assert len(one["message"]["tool_calls"]) == len(calls_of(one_streamed)) == 1
    (begun,) = calls_of(cut)
    assert begun["function"]["arguments"] and made[0]["function"]["arguments"].startswith(
        begun["function"]["arguments"]
    )
    assert not any(p["choices"][0]["delta"].get("content") for p in cut)


def calls_of(parts: list[Any]) -> list[Any]:
    """The calls of a stream: the arguments of each come in parts."""
    calls: list[Any] = []
    for p in parts:
        for c in p["choices"][0]["delta"].get("tool_calls", ()):
            if "id" in c:
                calls.append({**c, "function": {**c["function"]}})
            else:
                calls[c["index"]]["function"]["arguments"] += c["function"]["arguments"]
    return calls


def test_reasoning(tales: gg.Model) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>' if enable_thinking else '' }}"
    options = ServeOptions(n_parallel=1, chat_template=template, chat_template_kwargs='{"enable_thinking": true}')
    with TestClient(create_app(tales, options)) as c:
        form = 'root ::= "why </think> so"'
        message = chat(c, grammar=form, max_tokens=50)["choices"][0]["message"]
        assert (message["reasoning_content"].strip(), message["content"].strip()) == ("why", "so")
        plain = chat(
            c, grammar='root ::= "so"', reasoning_effort="none", chat_template_kwargs={"enable_thinking": False}
        )
        assert plain["choices"][0]["message"] == {"role": "assistant", "content": "so"}
        body = {"messages": HI, "max_tokens": 50, "temperature": 0}
        options = create_app(tales, ServeOptions(n_parallel=1, chat_template=template, defaults=gg_defaults(form)))
    with TestClient(options) as c:
        blocks = c.post("/v1/messages", json={**body, "thinking": {"type": "enabled"}}).json()["content"]
        assert [b["type"] for b in blocks] == ["thinking", "text"]
        items = c.post("/v1/responses", json={"input": "x", "reasoning": {"effort": "low"}}).json()["output"]
        assert items[-1]["type"] == "message"


def gg_defaults(grammar: str) -> Any:
    from pyggml.llm.samplers import TextParams

    return TextParams(n_predict=-1, grammar=grammar)


def test_json(client: TestClient) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [3, 4]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    got = chat(client, response_format=form, max_tokens=30, frequency_penalty=9)["choices"][0]  # of spaces
    assert json.loads(got["message"]["content"])["n"] in (3, 4) and got["finish_reason"] == "stop"


def test_completions(client: TestClient) -> None:
    def ask(**body: Any) -> Any:
        r = client.post("/v1/completions", json={"prompt": "A dog", "max_tokens": 5, "temperature": 0, **body})
        assert r.status_code == 200, r.text
        return r.json()

    plain = ask()["choices"][0]
    assert plain["finish_reason"] == "length" and plain["logprobs"] is None
    echoed = ask(echo=True, logprobs=2)["choices"][0]
    assert echoed["text"] == "A dog" + plain["text"] and echoed["logprobs"]["token_logprobs"][0] is None
    assert len(echoed["logprobs"]["tokens"]) == len(echoed["logprobs"]["token_logprobs"]) > 5
    assert ask(max_tokens=0)["choices"][0] == {"text": "", "index": 0, "logprobs": None, "finish_reason": "length"}
    assert ask(max_tokens=0, echo=True)["choices"][0]["text"] == "A dog"
    two = ask(prompt=["A dog", "A cat"])["choices"]
    assert two[0]["text"] == plain["text"] and two[1]["index"] == 1


def test_models(client: TestClient) -> None:
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == "tales" and model["meta"]["n_ctx_train"] == 512 and model["meta"]["n_params"] > 1e6


def test_embeddings(client: TestClient, tales: gg.Model) -> None:
    got = client.post("/v1/embeddings", json={"input": ["a dog", "a cat"], "model": "x"}).json()
    want = tales.embed([tales.tokenize("a dog", True, True), tales.tokenize("a cat", True, True)], n_threads=1)
    rows = np.array([d["embedding"] for d in got["data"]], np.float32)
    np.testing.assert_allclose(rows, want, atol=1e-6)
    assert [d["index"] for d in got["data"]] == [0, 1] and got["usage"]["prompt_tokens"] > 3
    coded = client.post("/v1/embeddings", json={"input": "a dog", "encoding_format": "base64"}).json()["data"][0]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(coded["embedding"]), "<f4"), want[0], atol=1e-6)
    native = client.post("/embedding", json={"content": "a dog", "embd_normalize": -1}).json()
    assert native[0]["index"] == 0 and abs(np.linalg.norm(native[0]["embedding"][0]) - 1) > 1e-3
    with TestClient(create_app(tales, ServeOptions(embeddings=True, pooling="none"))) as c:
        tokens = c.post("/embeddings", json={"content": "a dog"}).json()[0]["embedding"]
        assert len(tokens) == len(tales.tokenize("a dog", True, True)) and len(tokens[0]) == tales.hparams.n_embd
        assert c.post("/v1/embeddings", json={"input": "a"}).status_code == 400
        assert c.post("/completion", json={"prompt": "a"}).status_code == 501


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_no_reranker(client: TestClient, path: str) -> None:
    r = client.post(path, json={"query": "q", "documents": ["a"]})
    assert r.status_code == 400 and "no reranker" in r.json()["error"]["message"]


def test_rerank(tmp_path: Path) -> None:
    """As `Model.rerank`, the best first; a server for it continues no texts."""
    tokens = ["<unk>", "▁", *"abcdefgh"]
    kv = {"vocab_size": len(tokens), "attention.layer_norm_epsilon": 1e-5, "pooling_type": 4}
    head = ("cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias")
    model = gg.load_model(
        write_random(tmp_path / "m.gguf", "bert", kv, random_weights("bert", kv, head), tokens), repack=False
    )
    documents = ["a cab", "bad", "hedge"]
    want = model.rerank("a bad head", documents)
    with TestClient(create_app(model, ServeOptions(reranking=True))) as c:
        body = {"query": "a bad head", "documents": documents}
        got = c.post("/v1/rerank", json=body).json()
        assert [r["index"] for r in got["results"]] == np.argsort(-want).tolist()
        scores = {r["index"]: r["relevance_score"] for r in got["results"]}
        np.testing.assert_allclose([scores[i] for i in range(3)], want, rtol=1e-5)
        assert len(c.post("/rerank", json={**body, "top_n": 1}).json()["results"]) == 1
        objects = {**body, "documents": [{"text": d} for d in documents], "return_documents": True}
        cohere = c.post("/v2/rerank", json=objects).json()
        assert [r["document"]["text"] for r in cohere["results"]] == [documents[r["index"]] for r in got["results"]]
        assert cohere["meta"]["billed_units"]["search_units"] == 1 and cohere["id"].startswith("rerank")
        assert c.post("/v2/rerank", json={**body, "documents": [{"title": "x"}]}).status_code == 400
        tei = c.post("/rerank", json={"query": "a bad head", "texts": documents, "return_text": True}).json()
        assert [r["text"] for r in tei] == [documents[r["index"]] for r in tei] and "score" in tei[0]
        assert c.post("/completion", json={"prompt": "a"}).status_code == 501
        assert c.get("/slots").json() == [] and c.post("/slots/0?action=erase").status_code == 400


def test_messages(client: TestClient) -> None:
    """Results of tools, systems and stop sequences in Anthropic's shape are a chat's."""
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "How is it in Ulm?"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Ulm"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}]},
    ]
    tools = [{"name": "weather", "description": "d", "input_schema": TOOLS[0]["function"]["parameters"]}]
    body = {"messages": conversation, "max_tokens": 6, "system": "Be brief.", "tools": tools, "temperature": 0}
    got = client.post("/v1/messages", json=body)
    assert got.status_code == 200 and got.json()["stop_reason"] == "max_tokens", got.text
    n = client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]
    usage = got.json()["usage"]
    assert n == usage["input_tokens"] + usage["cache_read_input_tokens"] and usage["output_tokens"] == 6
    text = client.post("/v1/messages", json={**body, "tools": None}).json()["content"][0]["text"]
    word = text.split()[-1]
    cut = client.post("/v1/messages", json={**body, "tools": None, "stop_sequences": [word]}).json()
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", word)
    bad = client.post("/v1/messages", json={**body, "messages": [{"role": "user", "content": [{"type": "image"}]}]})
    assert bad.status_code == 400 and bad.json()["type"] == "error" and "image" in bad.json()["error"]["message"]


def test_a_message_that_was_begun_goes_on(client: TestClient, tales: gg.Model) -> None:
    """In each of the APIs: the answer has what follows, and is the text that the whole prompt leads to."""
    begun = [*HI, {"role": "assistant", "content": "The fox"}]
    prompt = client.post("/apply-template", json={"messages": HI}).json()["prompt"]
    body = {"prompt": prompt + "The fox", "n_predict": 8, "temperature": 0}
    want = client.post("/completion", json=body).json()["content"]
    got = chat(client, messages=begun)["choices"][0]
    assert got["message"]["content"] == want and got["finish_reason"] == "length"
    parts = chat(client, messages=begun, stream=True)
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in parts) == want
    for asked in (True, "content"):
        assert chat(client, messages=begun, continue_final_message=asked)["choices"][0] == got
    anthropic = {"messages": begun, "max_tokens": 8, "temperature": 0}
    assert client.post("/v1/messages", json=anthropic).json()["content"] == [{"type": "text", "text": want}]
    responses = {"input": begun, "max_output_tokens": 8, "temperature": 0}
    assert client.post("/v1/responses", json=responses).json()["output"][0]["content"][0]["text"] == want

    def shown(**body: Any) -> str:
        return client.post("/apply-template", json=body).json()["prompt"]

    assert shown(messages=begun) == prompt + "The fox"
    ended = shown(messages=begun, continue_final_message=False)
    assert ended.startswith(prompt + "The fox") and ended.endswith("assistant\n") and len(ended) > len(prompt) + 20
    assert shown(messages=HI, add_generation_prompt=False) == prompt.removesuffix("<|im_start|>assistant\n")
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert shown(messages=[*HI, {"role": "assistant", "tool_calls": [called]}]).endswith("assistant\n")
    for bad, says in (
        ({"continue_final_message": True, "add_generation_prompt": True}, "cannot both be true"),
        ({"continue_final_message": "thoughts"}, "reasoning_content"),
        ({"messages": HI, "continue_final_message": True}, "none of the assistant"),
        ({"tools": TOOLS, "tool_choice": "required"}, "neither follow a schema"),
    ):
        r = client.post("/v1/chat/completions", json={"messages": begun, **bad})
        assert r.status_code == 400 and says in r.json()["error"]["message"], r.text
    with TestClient(create_app(tales, ServeOptions(n_parallel=1, n_ctx=256, prefill_assistant=False))) as c:
        assert c.post("/apply-template", json={"messages": begun}).json()["prompt"] == ended


def test_one_model(client: TestClient) -> None:
    assert client.get("/v1/models/tales").json()["meta"]["n_vocab"] == 2048
    assert client.get("/v1/models/a/b").status_code == 404


def test_bodies_of_other_systems(client: TestClient) -> None:
    """Windows' mark of UTF-8 is no part of the JSON; what is compressed is refused by name."""
    assert client.post("/tokenize", content=b'\xef\xbb\xbf{"content": ""}').json() == {"tokens": []}
    r = client.post("/tokenize", content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
    assert r.status_code == 415 and "gzip" in r.json()["error"]["message"]


def test_responses_repeat_nothing_long(client: TestClient) -> None:
    """Three events of a stream have the request's tools and instructions."""
    tool = {"type": "function", "name": "f", "description": "x" * 200_000}
    body = {"input": "x", "max_output_tokens": 1, "tools": [tool], "tool_choice": "none", "stream": True}
    r = client.post("/v1/responses", json=body)
    assert r.status_code == 200 and r.text.count('"tools":null') == 3 and len(r.text) < 10_000


def test_a_message_of_many_blocks() -> None:
    """A message of 16 MB in blocks of a few words took minutes, in which nobody else was heard."""
    n, begun = 100_000, time.monotonic()
    (message,) = _messages({"role": "user", "content": [{"type": "text", "text": "x" * 50}] * n}, 0)
    assert message == {"role": "user", "content": "x" * 50 * n} and time.monotonic() - begun < 5
