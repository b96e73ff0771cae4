"""One budget of memory for the weights, for K and V of the slots, and for texts that are kept besides.

K and V have what the slots need, and the weights what is left: what does not fit is streamed. Texts are kept in what
neither takes.
"""

from __future__ import annotations

from typing import Any

from pyggml.errors import ModelError
from pyggml.llm.context import cache_bytes
from pyggml.llm.model import Model
from pyggml.stream.sizes import memory_size, shown_size

from .options import ServeOptions

_N_CTX = 4096  # cells of a slot when nobody says how many


def slot_tokens(model: Model, options: ServeOptions) -> int:
    """Tokens that a slot has room for; 0 when no texts are continued. Raises ModelError when there is no room."""
    if not (options.texts and model.architecture.logits):
        return 0
    trained = model.hparams.n_ctx_train
    n = options.n_ctx // options.n_parallel if options.n_ctx else min(trained, _N_CTX)
    if n < 2:
        raise ModelError(f"n_ctx = {options.n_ctx}: {options.n_parallel} slots have no room in it")
    return n


def kv_bytes(model: Model, options: ServeOptions) -> int:
    """Bytes for K and V (or states) of all slots. The model may be one of `vocab_only`."""
    n = slot_tokens(model, options) * options.n_parallel
    context: dict[str, Any] = {**options.context, "n_seq_max": options.n_parallel}
    return cache_bytes(model, n, **context) if n else 0


def weights_bytes(model: Model) -> int:
    """Bytes that the weights of a model take in memory."""
    stream = model.weight_stream
    return sum(t.nbytes for t in model.weights.values()) if stream is None else stream.nbytes


def ram_of_weights(model: Model, options: ServeOptions) -> int:
    """The part of `options.ram` for the weights. Raises ModelError when the slots leave nothing."""
    assert options.ram is not None
    ram, kv = memory_size(options.ram), kv_bytes(model, options)
    if ram <= kv:
        n = slot_tokens(model, options)
        raise ModelError(
            f"ram: {shown_size(ram)} leave nothing for weights: K and V of {options.n_parallel} slots of {n} tokens "
            f"take {shown_size(kv)}. Give more, or have fewer or smaller slots (-np, -c, -ctk and -ctv)"
        )
    return ram - kv


def ram_of_texts(model: Model, options: ServeOptions) -> int:
    """Bytes for texts that slots have no room for: `cache_ram`, or what weights and slots leave of `ram`."""
    most = options.cache_ram << 20
    if options.ram is None:
        return most
    left = memory_size(options.ram) - kv_bytes(model, options) - weights_bytes(model)
    return max(min(most, left), 0)
