"""A random model of any architecture, for tests of what golden data does not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from pyggml.models import get_architecture
from pyggml.models.weights import ShapeOnlyWeights

from .gguf_files import write_all

KV: dict[str, Any] = {
    "vocab_size": 64,
    "context_length": 256,
    "embedding_length": 32,
    "block_count": 4,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
Arrays = dict[str, npt.NDArray[np.float32]]


def random_weights(arch: str, kv: Mapping[str, Any], optional: tuple[str, ...] = ("output.weight",)) -> Arrays:
    """The tensors that the architecture asks for, with those optional ones, by name. Keys are without their prefix."""
    architecture = get_architecture(arch)
    keys = {f"{arch}.{k}": np.array(v) if isinstance(v, list) else v for k, v in {**KV, **kv}.items()}
    weights = architecture.declare(architecture.hparams(arch, keys), ShapeOnlyWeights(optional))
    for i in range(kv.get("nextn_predict_layers", 0)):
        architecture.declare(architecture.head_hparams(arch, keys, i), weights)
    specs = weights.asked.values()
    rng = np.random.default_rng(3)
    arrays: Arrays = {}
    for spec in specs:
        if spec.optional and spec.name not in optional:
            continue
        x = rng.standard_normal(spec.ne[::-1])
        arrays[spec.name] = (1.0 + x / 8 if len(spec.ne) == 1 else x * spec.ne[0] ** -0.5).astype(np.float32)
    return arrays


def write_random(
    path: Path, arch: str, kv: Mapping[str, Any], weights: Arrays | None = None, tokens: Sequence[str] = ()
) -> Path:
    """Write a model with KV and `kv`, keys without their prefix, the weights, by default random ones, and the tokens of
    a vocabulary, all of them text."""
    w = gguf.GGUFWriter(path, arch)
    for key, value in {**KV, **kv}.items():
        add = {bool: w.add_bool, int: w.add_uint32, float: w.add_float32, str: w.add_string, list: w.add_array}
        add[type(value)](f"{arch}.{key}", value)
    w.add_tokenizer_model("llama" if tokens else "none")
    if tokens:
        w.add_token_list(tokens)
        w.add_token_scores([0.0] * len(tokens))
        w.add_token_types([1] * len(tokens))
    for name, array in (random_weights(arch, kv) if weights is None else weights).items():
        w.add_tensor(name, array)
    write_all(w)
    return path
