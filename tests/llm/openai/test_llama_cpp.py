"""A script for llama-cpp-python runs with its import changed; docs/llama_cpp.md lists what is the same."""

# ruff: noqa: E501  (a script as others write them)
# pyright: reportPrivateUsage=false
from __future__ import annotations

import inspect
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyggml.errors import GGMLError, ModelError
from pyggml.llama_cpp import Llama, LlamaGrammar, LogitsProcessorList, StoppingCriteriaList, _internals, llama_cpp
from pyggml.llm.model import default_model_path

from ...tiny_model import write_gguf

SCRIPT = """
import json
from llama_cpp import Llama, LlamaGrammar, LogitsProcessorList, StoppingCriteriaList

llm = Llama(model_path=MODEL, n_ctx=512, n_gpu_layers=-1, seed=7, verbose=False)
out = llm("Q: Name the planets. A:", max_tokens=16, stop=["Q:"], echo=True, temperature=0.7, logprobs=3)
text, tokens = out["choices"][0]["text"], out["choices"][0]["logprobs"]["tokens"]
assert text.startswith("Q: Name") and len(tokens) == out["usage"]["total_tokens"] - 1
streamed = "".join(c["choices"][0]["text"] for c in llm.create_completion("Once", max_tokens=8, temperature=0, stream=True))
assert streamed == llm.create_completion("Once", max_tokens=8, temperature=0)["choices"][0]["text"]
grammar = LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
assert llm("Is it?", grammar=grammar)["choices"][0]["text"] in ("yes", "no")
tools = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, "required": ["city"]}}}]
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is it in Rome?"}]
choice = {"type": "function", "function": {"name": "weather"}}
message = llm.create_chat_completion(messages=messages, tools=tools, tool_choice=choice)["choices"][0]["message"]
call = message["tool_calls"][0]
assert call["function"]["name"] == "weather" and json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
assert llm.create_chat_completion(messages, tools=tools, max_tokens=8)["choices"][0]["finish_reason"] in ("stop", "length")
schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
answer = llm.create_chat_completion(messages[:2], response_format={"type": "json_object", "schema": schema}, temperature=0.7)
assert isinstance(json.loads(answer["choices"][0]["message"]["content"])["ok"], bool)
chat = llm.create_chat_completion(messages[:2], max_tokens=6, logprobs=True, top_logprobs=2)["choices"][0]
assert all(len(entry["top_logprobs"]) == 2 for entry in chat["logprobs"]["content"])
for chunk in llm.create_chat_completion(messages[:2], max_tokens=6, stream=True):
    print(chunk["choices"][0]["delta"].get("content", ""), end="")
embedder = Llama(MODEL, embedding=True, pooling_type=1, verbose=False)
assert len(embedder.create_embedding(["a", "b"])["data"][1]["embedding"]) == embedder.n_embd()
loud, stop = LogitsProcessorList([lambda ids, scores: scores * 2]), StoppingCriteriaList([lambda ids, logits: len(ids) > 40])
print(llm("More", max_tokens=64, logits_processor=loud, stopping_criteria=stop)["usage"])
"""
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    kv = {"tokenizer.chat_template": TEMPLATE, "llama.context_length": 1024}
    return str(write_gguf(tmp_path_factory.mktemp("compat") / "tiny.gguf", kv=kv))


def test_a_script_runs_with_its_import_changed(path: str) -> None:
    assert 30 <= len(SCRIPT.strip().splitlines()) <= 40
    exec(SCRIPT.replace("from llama_cpp import", "from pyggml.llama_cpp import"), {"MODEL": path})


def test_the_space_before_a_text_goes() -> None:
    llm = Llama(str(default_model_path()), n_ctx=16)
    assert llm.detokenize(llm.tokenize(b"Once upon")) == b"Once upon"
    assert llm.detokenize(llm.tokenize(b"Once", add_bos=False)) == b" Once"
    text: Any = "Once"
    for tokenize in (llm.tokenize, llm.tokenizer().tokenize, partial(llm._model.tokenize, add_bos=True, special=False)):
        with pytest.raises(ModelError, match=r"tokenize takes UTF-8, .*text\.encode\(\)\), not 'Once'"):
            tokenize(text)


def test_tokens_one_by_one(path: str) -> None:
    llm = Llama(path, n_ctx=128, seed=3, n_threads=1)
    ids = llm.tokenize(b"hello")
    assert ids[0] == llm.token_bos() == 1 and llm.detokenize(ids).endswith(b"hello") and llm.token_eos() == 2
    assert (
        llm.n_ctx() == 128
        and llm.n_vocab() == 259
        and llm.n_embd() == 32
        and llm.metadata["general.architecture"] == "llama"
    )
    tokens = llm.generate(ids, temp=0.0)
    first = [next(tokens) for _ in range(5)]
    assert llm.n_tokens == len(ids) + 4
    again = llm.generate(ids, temp=0.0)  # what the context holds is not evaluated again
    assert [next(again) for _ in range(5)] == first
    llm.reset()
    llm.eval(ids)
    assert llm.sample(temp=0.0) == first[0]
    sent = llm.generate(ids, temp=0.0)
    next(sent)
    sent.send([5, 6])
    assert llm.n_tokens == len(ids) + 3
    stopped = llm.generate(ids, temp=0.0, stopping_criteria=StoppingCriteriaList([lambda ids, _: len(ids) > 9]))
    assert len(list(stopped)) == 10 - len(ids)
    want = llm.create_completion("hello", max_tokens=5, temperature=0.0)["choices"][0]["text"]
    assert llm.detokenize(first, prev_tokens=ids).decode("utf-8", "replace") == want
    llm.close()


@pytest.mark.parametrize("n_batch", [4, 512])
def test_tokens_that_are_sent_in_and_put_behind_others(path: str, n_batch: int) -> None:
    llm = Llama(path, n_ctx=64, n_batch=n_batch, n_threads=1)
    ids, sent = llm.tokenize(b"hello there"), [7, 8, 9, 10, 11, 12]

    def after(tokens: list[int]) -> int:
        return next(Llama(path, n_ctx=64, n_threads=1).generate(tokens, temp=0.0))

    stream = llm.generate(ids, temp=0.0)
    first = next(stream)
    assert first == after(ids)
    assert stream.send(sent) == after([*ids, first, *sent]) and llm.n_tokens == len(ids) + 7
    llm.eval([20])  # between two tokens of a stream
    assert next(stream) == llm.sample(temp=0.0) and llm.n_tokens == len(ids) + 9
    llm.reset()
    llm.eval(ids)
    assert next(llm.generate(sent, reset=False, temp=0.0)) == after([*ids, *sent])
    assert llm.n_tokens == len(ids) + len(sent)
    with pytest.raises(GGMLError, match="context has room for 64"):
        next(llm.generate([5] * 65))
    rest = llm.generate(ids, temp=0.0)
    while llm.n_tokens < 64:
        next(rest)
    with pytest.raises(GGMLError):  # it does not end by itself
        next(rest)
    assert llm.n_tokens == 64


def test_embeddings(path: str) -> None:
    llm = Llama(path, embedding=True, n_threads=1)
    assert np.shape(llm.embed("ab")) == (6, 32)  # nothing pools them: one for each token
    rows, n = Llama(path, embedding=True, pooling_type=3, n_threads=1).embed(
        ["ab", "c"], normalize=True, return_count=True
    )
    assert np.shape(rows) == (2, 32) and n == 11 and np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    with pytest.raises(ModelError, match="embedding=True"):
        Llama(path).embed("x")


def test_grammars(path: str, tmp_path: Path) -> None:
    llm = Llama(path, n_threads=1)
    (tmp_path / "g.gbnf").write_text('root ::= "x"')
    assert llm("a", grammar=LlamaGrammar.from_file(tmp_path / "g.gbnf"))["choices"][0]["text"] == "x"
    of_schema = LlamaGrammar.from_json_schema('{"const": 7}')
    assert llm("a", grammar=of_schema)["choices"][0]["text"] == "7"
    twice = LogitsProcessorList([lambda ids, x: x + 1, lambda ids, x: x * 2])
    assert twice(None, np.ones(2)).tolist() == [4, 4]


def test_what_is_refused(path: str) -> None:
    with pytest.raises(TypeError, match="does not know the argument 'nothing'"):
        Llama(path, nothing=1)
    llm = Llama(path, n_ctx=32, n_threads=1)
    for bad in (lambda: llm("x" * 99), lambda: llm.sample(), lambda: next(llm.generate([]))):
        with pytest.raises(GGMLError):
            bad()


def test_the_penalties_look_back_as_far_as_the_object_says(path: str) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "repeat_penalty": 5.0}
    texts = {
        n: Llama(path, last_n_tokens_size=n, n_threads=1)("ab", **options)["choices"][0]["text"] for n in (0, 1, 64)
    }
    plain = Llama(path, n_threads=1)
    assert len(set(texts.values())) == 3 and texts[64] == plain("ab", **options)["choices"][0]["text"]
    assert texts[1] == plain("ab", repeat_last_n=1, **options)["choices"][0]["text"]
    ids, tokens = plain.tokenize(b"ab"), {}
    for n in (0, 64):
        stream = Llama(path, last_n_tokens_size=n, n_threads=1).generate(ids, temp=0.0, repeat_penalty=5.0)
        tokens[n] = [next(stream) for _ in range(20)]
    assert tokens[0] != tokens[64]
    with pytest.raises(ModelError, match="last_n_tokens_size must be"):
        Llama(path, last_n_tokens_size=-2)


def test_the_page_lists_what_is_there() -> None:
    text = (ROOT / "docs" / "llama_cpp.md").read_text(encoding="utf-8")
    same = text.partition("## The same")[2].partition("##")[0]
    listed = set(re.findall(r"`Llama\.(\w+)`", same))
    public = {n for n, v in inspect.getmembers(Llama) if not n.startswith("_")} | {"metadata", "model", "model_path"}
    other = set(re.findall(r"`Llama\.(\w+)`", text.partition("## Not the same")[2]))
    assert listed | (other & public) == public and listed <= public
    known: Any = inspect.signature(Llama).parameters
    for argument in re.findall(r"`(\w+)=`", same):
        assert argument in known, argument


def test_the_objects_behind_it(path: str) -> None:
    llm = Llama(path, n_ctx=64)
    model = llm._model
    assert model.token_get_text(model.token_bos()) == "<s>"
    assert model.tokenize(b"Once upon", True, True) == llm.tokenize(b"Once upon", True, True)
    ids = llm.tokenize(b"Once upon a time")
    llm.eval(ids)
    want = llm._ctx.get_logits_ith(-1).copy()
    assert llm._ctx.kv_cache_seq_rm(-1, 3, -1) and llm.n_tokens == 3
    llm.eval(ids[3:])
    assert np.array_equal(llm._ctx.get_logits_ith(-1), want)
    llm._ctx.kv_cache_clear()
    assert llm.n_tokens == 0 and llm._ctx.memory.used == 0


def test_without_a_llama(path: str) -> None:
    params = llama_cpp.llama_model_default_params()
    params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
    model = _internals.LlamaModel(path_model=path, params=params)
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = 64
    ctx = _internals.LlamaContext(model=model, params=options)
    tokens, got = model.tokenize(b"Once upon a time", add_bos=True, special=True), list[int]()
    stream = Llama(path, n_ctx=64).generate(tokens, temp=0.0)
    want = [next(stream) for _ in range(4)]
    batch, sampler = _internals.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1), _internals.LlamaSampler()
    sampler.add_top_k(40)
    sampler.add_temp(0.8)
    sampler.add_greedy()
    n_past = 0
    for _ in range(4):
        batch.set_batch(tokens, n_past, logits_all=False)
        ctx.decode(batch)
        n_past += len(tokens)
        tokens = [sampler.sample(ctx, -1)]
        got += tokens
    assert got == want
    with pytest.raises(RuntimeError, match="llama_decode returned 1"):
        for _ in range(20):
            batch.set_batch(range(5, 10), n_past, logits_all=True)
            ctx.decode(batch)
            n_past += 5
    model.close()
    assert ctx.ctx is None
    with pytest.raises(ValueError, match="Failed to load"):
        _internals.LlamaModel(path_model="none.gguf", params=params)
