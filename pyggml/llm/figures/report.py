"""The log lines about a model and a context, in the order and the words of llama.cpp's load report."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any, cast

import numpy as np

from pyggml.gguf_io.read import says
from pyggml.logger import LOG
from pyggml.models.memory.memory import Memory
from pyggml.sched import Scheduler

from ..loaded import LoadedModel

_MIB = 1 << 20
_SHOWN = 40  # a text in the metadata is cut behind so many characters
_PER_LAYER = ("n_head", "n_head_kv", "n_embd_head_k", "n_embd_head_v", "n_ff")  # reported for the first layer
_HPARAMS = ("n_ctx_train", "n_embd", "n_layer", *_PER_LAYER, "n_rot", "n_vocab", "n_expert", "n_expert_used")
_ROPE = ("rope_type", "rope_scaling_type", "rope_freq_base", "rope_freq_scale", "n_ctx_orig_yarn")


def log_model(model: LoadedModel) -> None:
    """Log the facts about a loaded model (INFO)."""
    if LOG.isEnabledFor(logging.INFO):
        for line in _model_lines(model):
            LOG.info("%s", line)


def log_context(memory: Memory, scheduler: Scheduler, n_threads: int, n_batch: int, n_ubatch: int) -> None:
    """Log the sizes of a new context (INFO)."""
    if LOG.isEnabledFor(logging.INFO):
        for line in _context_lines(memory, scheduler, n_threads, n_batch, n_ubatch):
            LOG.info("%s", line)


def _model_lines(model: LoadedModel) -> Iterator[str]:
    """Lines about a loaded model: metadata, types, hyperparameters, sizes."""
    from ..quantize.mixes import file_type_name

    kv, tensors = model.kv, model.tensors
    yield f"llama_model_loader: loaded {len(kv)} key-value pairs and {len(tensors)} tensors from {model.path}"
    for i, (key, value) in enumerate(kv.items()):
        yield f"llama_model_loader: - kv {i:3d}: {key:>45} = {_shown(value)}"
    for dtype, n in Counter(t.dtype.name for t in tensors.values()).most_common():
        yield f"llama_model_loader: - type {dtype:>7}: {n:4d} tensors"
    hp = model.hparams
    yield f"print_info: arch                  = {model.arch}"
    for name in (*_HPARAMS, *_ROPE):
        value = getattr(hp, name, None)
        if value not in (None, 0, ""):
            yield f"print_info: {name:<21} = {value[0] if isinstance(value, tuple) else value}"
    n_elements, n_bytes = sum(prod(t.ne) for t in tensors.values()), sum(t.nbytes for t in tensors.values())
    yield f"print_info: file type             = {file_type_name(kv.get('general.file_type')) or 'unknown'}"
    yield f"print_info: file size             = {n_bytes / _MIB:.2f} MiB ({8 * n_bytes / n_elements:.2f} BPW)"
    yield f"print_info: model params          = {_count(n_elements)}"
    if "tokenizer.ggml.model" in kv and not says(kv, "tokenizer.ggml.model", "none", "no_vocab"):
        vocab = model.vocab
        for role in ("bos", "eos", "eot", "unk", "pad"):
            token = getattr(vocab, role, None)
            if token is not None:
                yield f"print_info: {role.upper()} token             = {token} {vocab.text(token)!r}"
    repacking = model.repacking
    n, size = (0, 0) if repacking is None else (repacking.n_copies, repacking.size)
    yield f"load_tensors: CPU model buffer size   = {n_bytes / _MIB:8.2f} MiB"
    yield f"load_tensors: CPU repacked weights    = {size / _MIB:8.2f} MiB ({n} tensors)"


def _context_lines(memory: Memory, scheduler: Scheduler, n_threads: int, n_batch: int, n_ubatch: int) -> Iterator[str]:
    """Lines about a new context: its sizes, its caches, and the memory of its largest graph."""
    yield f"llama_context: n_ctx    = {memory.size}"
    yield f"llama_context: n_batch  = {n_batch}, n_ubatch = {n_ubatch}, n_threads = {n_threads}"
    for cache in memory.caches:
        k, v = (sum(t.nbytes for t in part) / _MIB for part in (cache.k_l, cache.v_l))
        of = f"{cache.size} cells, {len(cache.layers)} layers, flash_attn = {int(cache.flash_attn)}"
        types = f"K ({cache.type_k.name.lower()}): {k:.2f} MiB, V ({cache.type_v.name.lower()}): {v:.2f} MiB"
        yield f"llama_kv_cache: size = {k + v:.2f} MiB ({of}), {types}"
    for name in scheduler.backends:
        yield f"sched_reserve: {name.upper()} compute buffer size = {scheduler.buffer_size(name) / _MIB:.2f} MiB"


def _shown(value: Any) -> str:
    if isinstance(value, (list, np.ndarray)):
        items = cast("list[Any]", value)
        first, n = [repr(x)[:_SHOWN] for x in np.asarray(items[:4]).tolist()], len(items)
        return f"[{', '.join(first)}{', ...' if n > len(first) else ''}] ({n})"
    text = value.replace("\n", "\\n") if isinstance(value, str) else str(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _count(n: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if n >= unit:
            return f"{n / unit:.2f} {name}"
    return str(n)
