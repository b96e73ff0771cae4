"""What a `Llama` has evaluated: its logits, its states, caches of them; drafts, tokenizers, forms of chats."""

from __future__ import annotations

import ctypes
import itertools
import pickle
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml.llama_cpp as llama_cpp
from pyggml.dtypes import DType
from pyggml.errors import BatchError, GGMLError, StateError
from pyggml.hf.towers.mmproj import write_mmproj
from pyggml.llama_cpp import BaseLlamaCache, Llama, LlamaDiskCache, LlamaRAMCache, LlamaState
from pyggml.llama_cpp import llama_chat_format as formats
from pyggml.llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
from pyggml.llama_cpp.llama_tokenizer import LlamaTokenizer
from pyggml.llm.model import default_model_path, load_model
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from ...media_model import MM, WIDE, write_folder
from ...tiny_model import write_gguf

PROMPT = "Once upon a time there was a king who had three sons"
GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}


def new(**options: Any) -> Llama:
    return Llama(str(default_model_path()), n_ctx=128, n_threads=1, **options)


def text(answer: Any) -> str:
    return answer["choices"][0]["text"]


def test_logits(tmp_path: Path) -> None:
    llm, plain = new(logits_all=True), new()
    ids = llm.tokenize(PROMPT.encode())
    for part in (ids[:4], ids[4:]):
        llm.eval(part)
    plain.eval(ids)
    assert llm.scores.shape == (len(ids), llm.n_vocab()) and llm.input_ids.tolist() == ids == list(llm.eval_tokens)
    np.testing.assert_allclose(plain.scores, llm.scores, rtol=1e-4, atol=1e-4)
    assert len(llm.eval_logits) == len(ids) and len(plain.eval_logits) == 1
    assert llm.sample(temp=0.0) == plain.sample(temp=0.0, idx=len(ids) - 1) == int(llm.scores[-1].argmax())
    rows = Llama.logits_to_logprobs(llm.scores)
    np.testing.assert_allclose(np.exp(rows).sum(-1), 1, rtol=1e-4)
    llm.n_tokens = 5
    assert llm.input_ids.tolist() == ids[:5] and len(llm.scores) == 5
    with pytest.raises(BatchError):
        llm.n_tokens = 6


def test_states() -> None:
    llm = new(seed=4)
    first = text(llm(PROMPT, **GREEDY))
    state: LlamaState = pickle.loads(pickle.dumps(llm.save_state()))
    other = new()
    other.load_state(state)
    assert other.n_tokens == state.n_tokens == llm.n_tokens and other.sample(temp=0.0) == llm.sample(temp=0.0)
    other.ctx.perf_reset()
    assert text(other(PROMPT, **GREEDY)) == first and other.ctx.perf().n_p_eval == 0  # one token is no prompt
    again: Llama = pickle.loads(pickle.dumps(llm))
    assert text(again(PROMPT, **GREEDY)) == first and again.n_ctx() == 128
    state.llama_state = state.llama_state[:-5]
    with pytest.raises(StateError):
        other.load_state(state)


def test_seeds_follow_from_the_first() -> None:
    def texts() -> list[str]:
        llm = new(seed=5)
        return [text(llm("a", max_tokens=6, temperature=2.0)) for _ in range(3)]

    first = texts()
    assert first == texts() and len(set(first)) > 1


@pytest.mark.parametrize("make", [lambda _: LlamaRAMCache(), lambda folder: LlamaDiskCache(folder)])
def test_caches(make: Callable[[Path], BaseLlamaCache], tmp_path: Path) -> None:
    want = text(new()(PROMPT, **GREEDY))
    cache = make(tmp_path)
    writer, reader = new(), new()
    for llm in (writer, reader):
        llm.set_cache(cache)
    writer(PROMPT, **GREEDY)
    ids = writer.tokenize(PROMPT.encode())
    assert ids in cache and [5, 6] not in cache and cache.cache_size > 1000
    with pytest.raises(KeyError):
        cache[[5, 6]]
    reader.ctx.perf_reset()
    assert text(reader(PROMPT, **GREEDY)) == want and reader.ctx.perf().n_p_eval == 0
    reader("A fox and a cat", **GREEDY)
    assert text(reader(PROMPT, **GREEDY)) == want
    one = cache.cache_size
    cache.capacity_bytes = one - 1
    reader("The bird", **GREEDY)
    assert cache.cache_size < one
    cache.capacity_bytes = 10
    cache[ids] = writer.save_state()  # too large: left out
    state = writer.save_state()
    cache.capacity_bytes = 1 << 30
    state.adapters = "another"
    cache[ids] = state
    assert cache.find(ids, "another") is not None and cache[ids].adapters in ("another", "[]")
    assert text(new()(PROMPT, **GREEDY)) == want
    for path in tmp_path.glob("*.state"):
        path.write_bytes(b"{no")  # damaged files count as none
    assert text(reader(PROMPT, **GREEDY)) == want


@pytest.mark.parametrize("by", [LlamaPromptLookupDecoding(num_pred_tokens=3), None])
def test_drafts(by: LlamaDraftModel | None) -> None:
    class Bad(LlamaDraftModel):
        def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
            return np.full(4, 7, np.intc)

    plain, drafted = new(), new(draft_model=by or Bad())
    for prompt in (PROMPT, PROMPT + PROMPT, "A fox"):
        for _ in range(2):
            options = {**GREEDY, "max_tokens": 30}
            assert text(drafted(prompt, **options)) == text(plain(prompt, **options))
    assert drafted.input_ids.tolist() == drafted.tokenize(b"A fox") + drafted.input_ids.tolist()[-29:]


def test_tokenizers() -> None:
    class Twice(LlamaTokenizer):
        def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
            return super().tokenize(text + text, add_bos, special)

    plain = new()
    llm = new(tokenizer=Twice(plain))
    assert llm.tokenize(b"ab") == plain.tokenize(b"abab") and plain.tokenizer().decode(plain.tokenize(b"ab")) == "ab"
    assert llm("ab", **GREEDY)["usage"]["prompt_tokens"] == len(plain.tokenize(b"abab"))
    assert LlamaTokenizer.from_ggml_file(str(default_model_path())).encode("ab") == plain.tokenize(b"ab")


def test_forms_of_chats(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]

    @formats.register_chat_format("loud")
    def loud(*, messages: Any, **kwargs: Any) -> formats.ChatFormatterResponse:
        return formats.ChatFormatterResponse("".join(m["content"].upper() for m in messages), stop=["x"])

    llm = new(chat_format="loud")
    wanted = len(llm.tokenize(b"HI"))
    assert llm.create_chat_completion(messages, **GREEDY)["usage"]["prompt_tokens"] == wanted  # pyright: ignore[reportArgumentType]
    handler = formats.Jinja2ChatFormatter("{{ messages[0].content | upper }}", "</s>", "<s>").to_chat_handler()
    answer: Any = new(chat_handler=handler).create_chat_completion(messages, **GREEDY)
    assert answer["usage"]["prompt_tokens"] == wanted and answer["object"] == "chat.completion"
    assert formats.format_llama3(messages).prompt.endswith("assistant<|end_header_id|>\n\n")
    with pytest.raises(AttributeError):
        formats.format_nothing  # noqa: B018
    seen = formats.MTMDChatHandler.messages(
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,QUI="}}]}]
    )
    assert seen[0]["content"] == [{"type": "image", "image": b"AB"}]
    with pytest.raises(GGMLError, match="must begin with data:"):
        formats.MTMDChatHandler.messages([{"content": [{"type": "image_url", "image_url": "ftp://x"}]}])


@pytest.mark.skipif(not MM.is_dir(), reason=f"no golden data in {MM}")
def test_a_chat_with_a_picture(tmp_path: Path) -> None:
    """A GGUF file and an mmproj file answer as the folder does that they were made of."""
    folder = write_folder(tmp_path / "folder", "qwen2-5-vl")
    write_quantized(plan_quantization(folder, "F32"), tmp_path / "m.gguf")
    write_mmproj(folder, tmp_path / "mmproj.gguf", DType.F32)
    handler = formats.Qwen25VLChatHandler(str(tmp_path / "mmproj.gguf"))
    llm = Llama(str(tmp_path / "m.gguf"), chat_handler=handler, n_ctx=128, n_threads=1)
    url = f"data:image/png;base64,{b64encode(WIDE.read_bytes()).decode()}"
    text = {"type": "text", "text": "what is"}
    pictures: Any = {"type": "image_url", "image_url": {"url": url}}, {"type": "image", "image": str(WIDE)}
    chats: Any = [[{"role": "user", "content": [text, picture]}] for picture in pictures]
    options: Any = {"max_tokens": 4, "temperature": 0.0, "logprobs": True, "top_logprobs": 1}
    got: Any = llm.create_chat_completion(chats[0], **options)
    want: Any = load_model(folder, repack=False).create_chat_completion(chats[1], n_threads=1, **options)
    assert got["choices"][0]["logprobs"] == want["choices"][0]["logprobs"] and got["usage"] == want["usage"]
    assert got["usage"]["prompt_tokens"] > len(llm.tokenize(b"what is")) + 10


def test_rope_and_yarn(tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "m.gguf"))
    options: Any = {"rope_freq_base": 5000.0, "rope_scaling_type": 2, "rope_freq_scale": 0.5, "yarn_orig_ctx": 64}
    hp = Llama(path, yarn_beta_fast=16.0, n_threads=1, **options).model.hparams
    assert (hp.rope_freq_base, hp.rope_freq_scale, hp.rope_scaling_type) == (5000.0, 0.5, "yarn")


def test_low_level_functions() -> None:
    """A program as llama-cpp-python's README has one, and greedy decoding behind it."""
    llama_cpp.llama_backend_init()
    path, prompt = str(default_model_path()).encode(), PROMPT.encode()
    model = llama_cpp.llama_model_load_from_file(path, llama_cpp.llama_model_default_params())
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_threads = 64, 1
    ctx, vocab = llama_cpp.llama_init_from_model(model, params), llama_cpp.llama_model_get_vocab(model)
    tokens = (llama_cpp.llama_token * 64)()
    n = llama_cpp.llama_tokenize(vocab, prompt, len(prompt), tokens, 64, True, False)
    assert llama_cpp.llama_tokenize(vocab, prompt, len(prompt), tokens, 2, True, False) == -n
    assert llama_cpp.llama_decode(ctx, llama_cpp.llama_batch_get_one(tokens, n)) == 0
    sampler = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_greedy())
    made: list[int] = []
    for _ in range(8):
        token = llama_cpp.llama_sampler_sample(sampler, ctx, -1)
        made.append(token)
        batch = llama_cpp.llama_batch_init(1, 0, 1)
        batch.n_tokens, batch.token[0], batch.pos[0], batch.n_seq_id[0], batch.logits[0] = 1, token, n, 1, 1
        assert llama_cpp.llama_decode(ctx, batch) == 0
        n += 1
    buf = (ctypes.c_char * 64)()
    length = llama_cpp.llama_detokenize(vocab, made, len(made), buf, 64, False, False)
    assert buf[:length].decode() == text(new()(PROMPT, **GREEDY))
    assert llama_cpp.llama_decode(ctx, llama_cpp.llama_batch_get_one([5] * 64, 64)) == 1
    llama_cpp.llama_free(ctx)
    llama_cpp.llama_model_free(model)
    assert llama_cpp.llama_model_load_from_file(b"/nothing", llama_cpp.llama_model_default_params()) is None
    with pytest.raises(AttributeError, match=r"llama_state_get_size: use LlamaContext.save_state"):
        llama_cpp.llama_state_get_size  # noqa: B018
    assert llama_cpp.__version__ and llama_cpp.LLAMA_POOLING_TYPE_MEAN == 1
    assert llama_cpp.ChatCompletionRequestUserMessage(role="user", content="x") == {"role": "user", "content": "x"}
    assert len(list(itertools.islice(new().generate([1, 5], temp=0.0), 3))) == 3
