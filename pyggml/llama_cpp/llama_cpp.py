"""The `llama_...` functions and constants that programs call beside `Llama`: load, tokenize, decode, sample.

Where C has pointers to structures, these functions take and give Python objects: a model is a `pyggml` Model, a context
a LlamaContext, parameters are objects with the names of the C fields. Arrays may be ctypes arrays. Functions that are
not here raise AttributeError, which names the way to do it with pyggml.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..dtypes import DType
from ..errors import BackendError, GGMLError
from ..llm.batch import Batch
from ..llm.context import LlamaContext
from ..llm.model import Model, load_model
from ..llm.samplers import SamplerChain, SamplingParams
from ..llm.vocab import Vocab
from ..native.numa import Numa, numa_init
from ..types import Floats

_log = logging.getLogger("pyggml")

# -- constants --------------------------------------------------------------------------------------------------------

LLAMA_DEFAULT_SEED = 0xFFFFFFFF  # another seed each time
LLAMA_TOKEN_NULL = -1
LLAMA_MAX_DEVICES = 16
LLAMA_POOLING_TYPE_UNSPECIFIED = -1
LLAMA_POOLING_TYPE_NONE, LLAMA_POOLING_TYPE_MEAN, LLAMA_POOLING_TYPE_CLS = 0, 1, 2
LLAMA_POOLING_TYPE_LAST, LLAMA_POOLING_TYPE_RANK = 3, 4
LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED, LLAMA_ROPE_SCALING_TYPE_NONE = -1, 0
LLAMA_ROPE_SCALING_TYPE_LINEAR, LLAMA_ROPE_SCALING_TYPE_YARN = 1, 2
LLAMA_ATTENTION_TYPE_UNSPECIFIED, LLAMA_ATTENTION_TYPE_CAUSAL, LLAMA_ATTENTION_TYPE_NON_CAUSAL = -1, 0, 1
LLAMA_FLASH_ATTN_TYPE_AUTO, LLAMA_FLASH_ATTN_TYPE_DISABLED, LLAMA_FLASH_ATTN_TYPE_ENABLED = -1, 0, 1
LLAMA_SPLIT_MODE_NONE, LLAMA_SPLIT_MODE_LAYER, LLAMA_SPLIT_MODE_ROW = 0, 1, 2
LLAMA_VOCAB_TYPE_NONE, LLAMA_VOCAB_TYPE_SPM, LLAMA_VOCAB_TYPE_BPE, LLAMA_VOCAB_TYPE_WPM = 0, 1, 2, 3
GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q4_1 = 0, 1, 2, 3
GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_Q8_0, GGML_TYPE_Q8_1 = 6, 7, 8, 9
GGML_TYPE_Q2_K, GGML_TYPE_Q3_K, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_Q8_K = range(10, 16)
GGML_TYPE_IQ4_NL = 20
LLAMA_LOAD_MODE_AUTO, LLAMA_LOAD_MODE_NONE, LLAMA_LOAD_MODE_MMAP, LLAMA_LOAD_MODE_MLOCK = -1, 0, 1, 2
LLAMA_LOAD_MODE_MMAP_MLOCK, LLAMA_LOAD_MODE_DIRECT_IO = 3, 4
GGML_NUMA_STRATEGY_DISABLED, GGML_NUMA_STRATEGY_DISTRIBUTE, GGML_NUMA_STRATEGY_ISOLATE = 0, 1, 2
GGML_NUMA_STRATEGY_NUMACTL = 3
_NUMA: dict[int, Numa] = {
    GGML_NUMA_STRATEGY_DISTRIBUTE: "distribute",
    GGML_NUMA_STRATEGY_ISOLATE: "isolate",
    GGML_NUMA_STRATEGY_NUMACTL: "numactl",
}

c_int, llama_token, llama_pos, llama_seq_id = ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32
llama_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


@dataclass
class llama_model_params:
    """How a model is loaded. `load_mode`, one of LLAMA_LOAD_MODE_..., decides unless it is AUTO. Otherwise `use_mmap`
    and `use_mlock` do."""

    n_gpu_layers: int = 0
    vocab_only: bool = False
    use_mmap: bool = True
    use_mlock: bool = False
    load_mode: int = LLAMA_LOAD_MODE_AUTO


@dataclass
class llama_context_params:
    """What a context is like. `n_ctx` 0: as long as the model was trained for."""

    n_ctx: int = 512
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = 0
    n_threads_batch: int = 0
    flash_attn_type: int = LLAMA_FLASH_ATTN_TYPE_DISABLED
    embeddings: bool = False
    pooling_type: int = LLAMA_POOLING_TYPE_UNSPECIFIED
    type_k: int = GGML_TYPE_F16
    type_v: int = GGML_TYPE_F16
    offload_kqv: bool = True
    no_perf: bool = True


def llama_model_default_params() -> llama_model_params:
    """The default parameters of models."""
    return llama_model_params()


def llama_context_default_params() -> llama_context_params:
    """The default parameters of contexts."""
    return llama_context_params()


# -- the library ------------------------------------------------------------------------------------------------------


def llama_backend_init() -> None:
    """Nothing has to be begun."""


def llama_backend_free() -> None:
    """Nothing has to be ended."""


def llama_numa_init(numa: int) -> None:
    """Place threads and memory on a machine with several memory nodes. Raises BackendError for a number that is none of
    GGML_NUMA_STRATEGY_*."""
    if numa in _NUMA:
        numa_init(_NUMA[numa])
    elif numa != GGML_NUMA_STRATEGY_DISABLED:
        raise BackendError(f"numa must be one of 0, {', '.join(map(str, _NUMA))}, not {numa!r:.40}")


def llama_max_devices() -> int:
    """The most devices that llama-cpp-python takes."""
    return LLAMA_MAX_DEVICES


def llama_supports_mmap() -> bool:
    """Models are mapped."""
    return True


def llama_supports_mlock() -> bool:
    """Models can be kept in RAM."""
    return True


def llama_supports_gpu_offload() -> bool:
    """This is a library for CPUs."""
    return False


def llama_time_us() -> int:
    """Microseconds, of a clock that only goes forward."""
    return time.monotonic_ns() // 1000


def llama_print_system_info() -> bytes:
    """The kind of machine; `pyggml --version` tells which instructions its kernels use."""
    import platform

    return platform.machine().encode()


class _Called(logging.Handler):
    def __init__(self, call: Callable[..., Any], data: Any) -> None:
        super().__init__()
        self._call, self._data = call, data

    def emit(self, record: logging.LogRecord) -> None:
        level = 2 + (record.levelno >= logging.WARNING) + (record.levelno >= logging.ERROR)  # ggml's numbers
        self._call(level, f"{record.getMessage()}\n".encode(), self._data)


def llama_log_set(log_callback: Callable[..., Any] | None, user_data: Any = None) -> None:
    """Call a function (level, text, user_data) with what is logged (`logging.getLogger("pyggml")`), and with nothing
    else any more; None: as before."""
    for handler in [h for h in _log.handlers if isinstance(h, _Called)]:
        _log.removeHandler(handler)
    _log.propagate = log_callback is None
    if log_callback is not None:
        _log.addHandler(_Called(log_callback, user_data))


# -- models -----------------------------------------------------------------------------------------------------------


def llama_model_load_from_file(path_model: bytes, params: llama_model_params) -> Model | None:
    """Load a model; None, with an error in the log, for a file that cannot be loaded."""
    mode, use_mmap, use_mlock = params.load_mode, params.use_mmap, params.use_mlock
    if mode != LLAMA_LOAD_MODE_AUTO:
        use_mmap = mode in (LLAMA_LOAD_MODE_MMAP, LLAMA_LOAD_MODE_MMAP_MLOCK)
        use_mlock = mode in (LLAMA_LOAD_MODE_MLOCK, LLAMA_LOAD_MODE_MMAP_MLOCK)
    try:
        return load_model(path_model.decode(), use_mmap, use_mlock, params.vocab_only)
    except (GGMLError, OSError) as e:
        _log.error("%s", e)
        return None


def llama_model_free(model: Model) -> None:
    """Close a model."""
    model.close()


def llama_model_get_vocab(model: Model) -> Vocab:
    """The vocabulary."""
    return model.vocab


def llama_model_n_ctx_train(model: Model) -> int:
    """The length of context that the model was trained for."""
    return model.hparams.n_ctx_train


def llama_model_n_embd(model: Model) -> int:
    """Length of embeddings."""
    return model.hparams.n_embd


def llama_model_n_layer(model: Model) -> int:
    """Layers."""
    return model.hparams.n_layer


def llama_model_n_params(model: Model) -> int:
    """Numbers that the weights are."""
    return sum(int(np.prod(t.ne)) for t in model.tensors.values())


def llama_model_size(model: Model) -> int:
    """Bytes of all tensors."""
    return sum(t.nbytes for t in model.tensors.values())


def llama_model_is_recurrent(model: Model) -> bool:
    """Whether the model remembers in states alone."""
    return model.architecture.memory == "recurrent"


def llama_model_is_hybrid(model: Model) -> bool:
    """Whether the model remembers in states, and keys and values."""
    return model.architecture.memory == "hybrid"


# -- contexts ---------------------------------------------------------------------------------------------------------

_POOLING = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}


def llama_init_from_model(model: Model, params: llama_context_params) -> LlamaContext | None:
    """A context; None, with an error in the log, when it cannot be made."""
    options: Any = {"n_batch": params.n_batch, "n_ubatch": params.n_ubatch, "n_seq_max": params.n_seq_max}
    options |= {"n_threads": params.n_threads or None, "n_threads_batch": params.n_threads_batch or None}
    options["flash_attn"] = params.flash_attn_type > 0
    if params.embeddings:
        options |= {"embeddings": True, "pooling": _POOLING.get(params.pooling_type)}
    try:
        options["type_k"], options["type_v"] = _dtype(params.type_k), _dtype(params.type_v)
        return model.new_context(params.n_ctx or model.hparams.n_ctx_train, **options)
    except GGMLError as e:
        _log.error("%s", e)
        return None


def llama_free(ctx: LlamaContext) -> None:
    """Close a context."""
    ctx.close()


def llama_n_ctx(ctx: LlamaContext) -> int:
    """Tokens of a context."""
    return ctx.n_ctx


def llama_n_batch(ctx: LlamaContext) -> int:
    """Tokens of a batch."""
    return ctx.n_batch


def llama_get_model(ctx: LlamaContext) -> Any:
    """The model of a context."""
    return ctx.model


def llama_get_memory(ctx: LlamaContext) -> Any:
    """What a context remembers."""
    return ctx.memory


def llama_memory_clear(mem: Any, data: bool) -> None:
    """Forget everything."""
    mem.clear()


def llama_memory_seq_rm(mem: Any, seq_id: int, p0: int, p1: int) -> bool:
    """Forget the positions from p0 on, and before p1, of a sequence; negative: all."""
    return mem.seq_rm(seq_id, p0, p1)


def llama_memory_seq_cp(mem: Any, seq_id_src: int, seq_id_dst: int, p0: int, p1: int) -> None:
    """Let a sequence share positions of another."""
    mem.seq_cp(seq_id_src, seq_id_dst, p0, p1)


def llama_memory_seq_pos_max(mem: Any, seq_id: int) -> int:
    """The last position of a sequence; -1 when it is empty."""
    return mem.seq_pos_max(seq_id)


@dataclass
class llama_batch:
    """Tokens to evaluate. For each: its id, its position, its sequences, and whether it gets logits."""

    n_tokens: int
    token: Any
    pos: Any = None
    n_seq_id: Any = None
    seq_id: Any = None
    logits: Any = None


def llama_batch_init(n_tokens: int, embd: int, n_seq_max: int) -> llama_batch:
    """A batch with room for `n_tokens` tokens; set its fields, and `n_tokens`."""
    seqs = [[0] * n_seq_max for _ in range(n_tokens)]
    ints = [[0] * n_tokens for _ in range(4)]
    return llama_batch(0, ints[0], ints[1], ints[2], seqs, ints[3])


def llama_batch_free(batch: llama_batch) -> None:
    """Nothing has to be freed."""


def llama_batch_get_one(tokens: Sequence[int], n_tokens: int) -> llama_batch:
    """A batch of tokens that follow those of sequence 0; the last gets logits."""
    return llama_batch(n_tokens, tokens)


def llama_decode(ctx: LlamaContext, batch: llama_batch) -> int:
    """Evaluate a batch. Returns 0, 1 when there is no room, and -1, with an error in the log, for a bad batch."""
    from ..errors import KVCacheFull

    try:
        if batch.pos is None:
            ctx.decode([int(t) for t in batch.token[: batch.n_tokens]])
            return 0
        made = Batch()
        for i in range(batch.n_tokens):
            seqs = [int(s) for s in batch.seq_id[i][: int(batch.n_seq_id[i])]]
            made.add(int(batch.token[i]), int(batch.pos[i]), seqs, bool(batch.logits[i]))
        ctx.decode(made)
    except KVCacheFull:
        return 1
    except GGMLError as e:
        _log.error("%s", e)
        return -1
    return 0


def llama_get_logits(ctx: LlamaContext) -> Floats:
    """The logits of the last decode, float32, row by row."""
    return ctx.logits.reshape(-1)


def llama_get_logits_ith(ctx: LlamaContext, i: int) -> Floats:
    """The logits of a token of the last batch; negative: from its end."""
    return ctx.logits_ith(i)


def llama_get_embeddings(ctx: LlamaContext) -> Floats:
    """The embeddings of the last decode, float32, row by row."""
    return ctx.embeddings.reshape(-1)


def llama_get_embeddings_seq(ctx: LlamaContext, seq_id: int) -> Floats:
    """The embedding of a sequence."""
    return ctx.embeddings_seq(seq_id)


# -- tokens -----------------------------------------------------------------------------------------------------------


def llama_tokenize(
    vocab: Vocab, text: bytes, text_len: int, tokens: Any, n_tokens_max: int, add_special: bool, parse_special: bool
) -> int:
    """Write the tokens of a text into an array. Returns how many there are; negative when there is no room for so
    many."""
    ids = vocab.tokenize(text[:text_len], add_special, parse_special)
    if len(ids) > n_tokens_max:
        return -len(ids)
    for i, token in enumerate(ids):
        tokens[i] = token
    return len(ids)


def llama_token_to_piece(vocab: Vocab, token: Any, buf: Any, length: int, lstrip: int, special: bool) -> int:
    """Write the text of a token into a buffer. Returns its length; negative when there is no room for it."""
    return _written(vocab.token_to_piece(int(getattr(token, "value", token)), special=special), buf, length)


def llama_detokenize(
    vocab: Vocab, tokens: Any, n_tokens: int, text: Any, text_len_max: int, remove_special: bool, unparse_special: bool
) -> int:
    """Write the text of tokens into a buffer. Returns its length; negative when there is no room for it."""
    data = b"".join(vocab.token_to_piece(int(t), special=unparse_special) for t in tokens[:n_tokens])
    return _written(data, text, text_len_max)


def _written(data: bytes, buf: Any, length: int) -> int:
    if len(data) > length:
        return -len(data)
    buf[: len(data)] = data
    return len(data)


def llama_vocab_n_tokens(vocab: Vocab) -> int:
    """How many tokens there are."""
    return vocab.n_tokens


def id_or_minus_1(token: int | None) -> int:
    """A token as llama.cpp gives it: -1 when there is none."""
    return -1 if token is None else token


def llama_vocab_bos(vocab: Vocab) -> int:
    """The token at the beginning of texts; -1 when there is none."""
    return id_or_minus_1(vocab.bos)


def llama_vocab_eos(vocab: Vocab) -> int:
    """The token at the end of texts; -1 when there is none."""
    return id_or_minus_1(vocab.eos)


def llama_vocab_nl(vocab: Vocab) -> int:
    """The token of a new line; -1 when there is none."""
    return id_or_minus_1(vocab.nl)


def llama_vocab_is_eog(vocab: Vocab, token: int) -> bool:
    """Whether a token ends texts."""
    return vocab.is_eog(token)


def llama_vocab_get_text(vocab: Vocab, token: int) -> bytes:
    """A token as the vocabulary spells it."""
    return vocab.text(token).encode()


# -- samplers ---------------------------------------------------------------------------------------------------------


@dataclass
class llama_sampler:
    """A sampler: options of `SamplingParams`, and its place in a chain."""

    name: str
    options: dict[str, Any]
    chain: list[llama_sampler] = field(default_factory=list["llama_sampler"])
    made: SamplerChain | None = None


def llama_sampler_chain_default_params() -> None:
    """Chains have no parameters."""


def llama_sampler_chain_init(params: Any) -> llama_sampler:
    """An empty chain."""
    return llama_sampler("chain", {})


def llama_sampler_chain_add(chain: llama_sampler, smpl: llama_sampler) -> None:
    """Put a sampler behind the others."""
    chain.chain.append(smpl)
    chain.made = None


def llama_sampler_init_greedy() -> llama_sampler:
    """Takes the likeliest token."""
    return llama_sampler("", {"temp": 0.0})


def llama_sampler_init_dist(seed: int) -> llama_sampler:
    """Draws a token."""
    return llama_sampler("", {} if seed == LLAMA_DEFAULT_SEED else {"seed": seed})


def llama_sampler_init_top_k(k: int) -> llama_sampler:
    """Keeps the k likeliest tokens."""
    return llama_sampler("top_k", {"top_k": k})


def llama_sampler_init_top_p(p: float, min_keep: int) -> llama_sampler:
    """Keeps the likeliest tokens that together have this probability."""
    return llama_sampler("top_p", {"top_p": p})


def llama_sampler_init_min_p(p: float, min_keep: int) -> llama_sampler:
    """Keeps tokens that are at least so likely, beside the likeliest."""
    return llama_sampler("min_p", {"min_p": p})


def llama_sampler_init_temp(t: float) -> llama_sampler:
    """Divides logits."""
    return llama_sampler("temperature", {"temp": t})


def llama_sampler_init_penalties(
    penalty_last_n: int, penalty_repeat: float, penalty_freq: float, penalty_present: float
) -> llama_sampler:
    """Makes tokens that were there less likely."""
    options = {"repeat_last_n": penalty_last_n, "repeat_penalty": penalty_repeat}
    options |= {"frequency_penalty": penalty_freq, "presence_penalty": penalty_present}
    return llama_sampler("penalties", options)


def llama_sampler_sample(smpl: llama_sampler, ctx: LlamaContext, idx: int) -> int:
    """Choose a token by the logits of a token of the last batch."""
    if smpl.made is None:
        parts = smpl.chain or [smpl]
        options: dict[str, Any] = {k: v for part in parts for k, v in part.options.items()}
        given: dict[str, Any] = {"temp": 1.0, **options}
        order = tuple(part.name for part in parts if part.name)
        smpl.made = SamplerChain(SamplingParams(**given, samplers=order), ctx.model.vocab)
    token = smpl.made.sample(np.array(ctx.logits_ith(idx)))
    smpl.made.accept(token)
    return token


def llama_sampler_accept(smpl: llama_sampler, token: int) -> None:
    """Nothing: `llama_sampler_sample` has told the chain."""


def llama_sampler_reset(smpl: llama_sampler) -> None:
    """Forget all tokens."""
    smpl.made = None


def llama_sampler_free(smpl: llama_sampler) -> None:
    """Nothing has to be freed."""


# -- older names, and what is not here --------------------------------------------------------------------------------

llama_load_model_from_file, llama_free_model = llama_model_load_from_file, llama_model_free
llama_new_context_with_model = llama_init_from_model
llama_n_vocab, llama_token_bos, llama_token_eos = llama_vocab_n_tokens, llama_vocab_bos, llama_vocab_eos

_INSTEAD = {  # beginnings of names: pyggml's way
    "llama_state": "LlamaContext.save_state and load_state",
    "llama_model_quantize": "`pyggml quantize`",
    "llama_adapter": "Model.load_lora and LlamaContext.set_loras",
    "llama_set_adapter": "LlamaContext.set_loras",
    "llama_kv": "LlamaContext.memory",
    "llama_memory": "LlamaContext.memory",
    "llama_sampler": "SamplingParams, the options of Model.generate",
    "llama_sample": "SamplingParams, the options of Model.generate",
    "llama_perf": "LlamaContext.perf()",
    "llama_print_timings": "LlamaContext.perf()",
    "llama_chat": "Model.create_chat_completion",
    "llama_eval": "llama_decode, or LlamaContext.decode",
    "llama_opt": "Model.trainer",
    "llama_grammar": "the option grammar of Model.generate",
    "mtmd": "load_model(mmproj=...)",
    "ggml": "pyggml itself, whose ops have ggml's names (docs/from_ggml.md)",
    "llama_": "Llama, or pyggml.load_model and its contexts",
}


def not_here(name: str) -> AttributeError:
    """The error for a name of llama-cpp-python that is not here."""
    way = next((way for begin, way in _INSTEAD.items() if name.startswith(begin)), None)
    hint = "" if way is None else f": use {way}"
    return AttributeError(f"pyggml.llama_cpp has no {name}{hint}")


def __getattr__(name: str) -> Any:
    raise not_here(name)


def _dtype(number: int) -> DType:
    found = next((t for t in DType if t.gguf_id == number), None)
    if found is None:
        raise GGMLError(f"there is no ggml type {number}")
    return found
