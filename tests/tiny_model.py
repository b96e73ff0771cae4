"""A tiny random llama model, written to a file, for tests that need a model and no golden data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from pyggml.models import get_architecture
from pyggml.models.weights import ShapeOnlyWeights

from .gguf_files import write_all

TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
KV: dict[str, Any] = {
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
WriteModel = Callable[..., Path]


def write_gguf(
    path: Path,
    kv: Mapping[str, Any] | None = None,
    ne: Mapping[str, tuple[int, ...]] | None = None,
    drop: tuple[str, ...] = (),
    arch: str = "llama",
    optional: tuple[str, ...] = ("output.weight",),
    seed: int = 7,
    extra: tuple[str, ...] = (),
) -> Path:
    """Write a model with `kv` changed (None removes a key), tensors `ne` of another shape, tensors `drop` left out, and
    `extra` ones."""
    keys = {k: v for k, v in {**KV, **(kv or {})}.items() if v is not None}
    shapes = {**KV, **{k: v for k, v in keys.items() if k in KV or "expert" in k or "length" in k}}
    llama = get_architecture("llama")
    hp = llama.hparams("llama", {**shapes, "tokenizer.ggml.tokens": TOKENS})
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        if isinstance(value, str):
            w.add_string(key, value)
        elif isinstance(value, float):
            w.add_float32(key, value)
        elif isinstance(value, list):
            w.add_array(key, value)
        else:
            w.add_uint32(key, value)
    w.add_tokenizer_model("llama")
    w.add_token_list(TOKENS)
    w.add_token_scores([0.0] * len(TOKENS))
    w.add_token_types([2, 3, 3, *[6] * 256])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    specs = llama.declare(hp, ShapeOnlyWeights(optional)).asked.values()
    for spec in sorted(specs, key=lambda s: s.name.split(".")[1].zfill(3) if s.name.startswith("blk.") else ""):
        if spec.name in drop or (spec.optional and spec.name not in optional):
            continue
        shape = (ne or {}).get(spec.name, spec.ne)[::-1]
        data = rng.standard_normal(shape) / np.sqrt(shape[-1]) if len(shape) > 1 else 1 + rng.standard_normal(shape) / 8
        w.add_tensor(spec.name, data.astype(np.float32))
    for name in extra:
        w.add_tensor(name, np.ones(1, np.float32))
    write_all(w)
    return path


@pytest.fixture
def write_model(tmp_path: Path) -> WriteModel:
    """`write_gguf` into a fresh folder."""
    return lambda **changes: write_gguf(tmp_path / "tiny.gguf", **changes)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as it is."""
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
