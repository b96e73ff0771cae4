"""Descriptions, in the form of the golden data, of the architectures that the golden data leaves out: those of folders
of Hugging Face, and small ones of this project's own. T5's decoder and Whisper are not here: besides tokens they are
given a text or a sound."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import numpy as np
from pyggml.models import get_architecture
from pyggml.models.weights import ShapeOnlyWeights

from pyggml.hf.folder import bind_folder, open_hf_folder
from pyggml.tensor import rank_of

from ..conftest import shared_dir

FOLDER = shared_dir() / "golden" / "hf"
FOLDERS = {  # name -> architecture
    **{
        name: name
        for name in ("apertus", "bert", "eurobert", "gemma-embedding", "gemma3n", "gemma4", "gptj", "nomic-bert")
    },
    "modernbert": "modern-bert",
}
LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "context_length": 64,
    "embedding_length": 32,
    "block_count": LAYERS,
    "feed_forward_length": 48,
    "attention.head_count": 4,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.token_type_count": 2,
}
_RANKS = {f"attention.{name}_lora_rank": 4 + i for i, name in enumerate(("decay", "iclr", "value_residual_mix"))}
_GOOSE = {**SIZES, "wkv.head_size": 8, **_RANKS}
_MIXED = {**SIZES, "wkv.head_size": 8, "time_mix_extra_dim": 6, "time_decay_extra_dim": 5, "attention.head_count_kv": 2}
_T5 = {"attention.relative_buckets_count": 8, "attention.key_length": 8, "attention.value_length": 8}
_LERP = ("lerp_fused.weight", "key.bias", "value.bias", "receptance.bias")
_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output", "attn_output_norm", "layer_output_norm", "ffn_up", "ffn_down")
_BERT = ["token_types.weight", "token_embd_norm.bias", *(f"blk.N.{role}.bias" for role in _BIASES)]
OWN: dict[str, tuple[str, dict[str, Any], list[str]]] = {  # name -> architecture, keys, optional tensors
    "rwkv7": ("rwkv7", {**_GOOSE, "attention.gate_lora_rank": 7}, []),
    "arwkv7": ("arwkv7", _GOOSE, []),
    "rwkv6qwen2": ("rwkv6qwen2", _MIXED, [f"blk.N.time_mix_{name}" for name in _LERP]),
    "jina-bert-v2": ("jina-bert-v2", SIZES, [*_BERT, "blk.N.ffn_gate.weight"]),
    "jina-bert-v3": ("jina-bert-v3", SIZES, _BERT),
    "nomic-bert-moe": (
        "nomic-bert-moe",
        {**SIZES, "expert_count": 4, "expert_used_count": 2, "moe_every_n_layers": 2},
        ["token_types.weight"],
    ),
    "neo-bert": ("neo-bert", SIZES, ["blk.N.attn_qkv.weight"]),
    "t5encoder": ("t5encoder", {**SIZES, **_T5}, []),
}


PREFIX = "other "
ARCHS = {*FOLDERS.values(), *(arch for arch, _, _ in OWN.values())}
NAMES = [PREFIX + name for name in (*FOLDERS, *OWN)] if FOLDER.is_dir() else []


@cache
def spec_of(name: str) -> dict[str, Any]:
    """The description of one of NAMES."""
    name = name.removeprefix(PREFIX)
    return _of_own(name) if name in OWN else _of_folder(name)


def _of_folder(name: str) -> dict[str, Any]:
    folder = open_hf_folder(FOLDER / name)
    arch = FOLDERS[name]
    kv = {k: v for k, v in folder.kv.items() if not k.startswith(("general.", "tokenizer.")) or "token_type_count" in k}
    tensors = [(n, list(t.ne[: rank_of(t.ne)])) for n, t in bind_folder(folder).items()]
    return _spec(arch, kv, tensors)


def _of_own(name: str) -> dict[str, Any]:
    arch, keys, optional = OWN[name]
    kv = {k if k.startswith("tokenizer.") else f"{arch}.{k}": v for k, v in keys.items()}
    named = {re.sub(r"\bN\b", str(il), o) for o in optional for il in range(LAYERS)}
    architecture = get_architecture(arch)
    asked = architecture.declare(architecture.hparams(arch, kv), ShapeOnlyWeights(named)).asked.values()
    return _spec(arch, kv, [(s.name, list(s.ne)) for s in asked if not s.optional or s.name in named])


def _spec(arch: str, kv: Mapping[str, Any], tensors: Collection[tuple[str, list[int]]]) -> dict[str, Any]:
    typed = [[k, *_typed(v)] for k, v in kv.items()] + [["tokenizer.ggml.model", "str", "none"]]
    hp = get_architecture(arch).hparams(arch, kv)
    return {"arch": arch, "kv": typed, "tensors": tensors, "n_vocab": hp.n_vocab}


def _typed(value: Any) -> tuple[str, Any]:
    """The golden data's name of a value's type, and the value in plain Python."""
    value = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    if isinstance(value, list):
        return f"[{_typed(value[0])[0]}", value
    if isinstance(value, int) and not isinstance(value, bool):
        return "i32" if value < 0 else "u32", value
    return {bool: "bool", str: "str", float: "f32"}[type(value)], value
