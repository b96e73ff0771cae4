"""The tiny models of the golden data, with indexers that choose little: what of their metadata is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pyggml.llm.model import Model, load_model
from pyggml.types import Floats, Ints

from .archs import ARCH_FILE, SPECS

N_TOKENS = 48


class Sparse(NamedTuple):
    """keys: that are changed or added. layers: which choose, by the indexer of which. size: tokens of what is chosen as
    a whole. moves: positions can be changed, by multiples of `size`."""

    keys: dict[str, tuple[str, Any]]
    layers: dict[int, int]
    size: int = 1
    moves: bool = True


def _top_k(n: int) -> dict[str, tuple[str, Any]]:
    return {"attention.indexer.top_k": ("u32", n)}


_TYPES = {"attention.indexer.types": ("[u32", [1, 0])}
SPARSE = {
    "deepseek32-moe": Sparse(_top_k(10), {0: 0, 1: 1}),
    "glm-dsa-moe": Sparse(_top_k(10) | _TYPES, {0: 0, 1: 0}),
    "dots3note-moe": Sparse(_top_k(10), {0: 0}),
    "hy_v4-moe": Sparse(_top_k(10), {0: 0, 1: 0}),
    "minimax-m3-moe": Sparse(_top_k(4), {1: 1}, 4),
    "deepseek4-moe": Sparse(_top_k(3), {2: 2}, 4, False),
    "glm5-next-moe": Sparse(_top_k(12), {0: 0}, 4, False),
    "qwen4exp-moe": Sparse(_top_k(12) | {"attention.compress_ratios": ("[u32", [0, 4])}, {1: 1}, 4, False),
}


def write_sparse(name: str, path: Path) -> None:
    """Write the model, with its changed keys."""
    assert ARCH_FILE is not None
    spec: dict[str, Any] = dict(SPECS[name])
    arch, keys = spec["arch"], dict(SPARSE[name].keys)
    kv = [(key, *keys.pop(key.removeprefix(f"{arch}."), (kind, value))) for key, kind, value in spec["kv"]]
    spec["kv"] = kv + [(f"{arch}.{key}", *value) for key, value in keys.items()]
    ARCH_FILE.write(name, path, spec=spec)


def load_sparse(name: str, folder: Path) -> Model:
    path = folder / f"{name}.gguf"
    write_sparse(name, path)
    return load_model(path, repack=False)


def sparse_tokens(name: str) -> list[int]:
    rng = np.random.default_rng(sum(name.encode()))
    return rng.integers(0, 128, N_TOKENS).tolist()


# -- what they choose, in float64 -------------------------------------------------------------------------------------


def _weight(model: Model, role: str, il: int, suffix: str = "weight") -> Floats:
    return model.tensors[f"blk.{il}.{role}.{suffix}"].numpy().astype(np.float64)


def _roped(x: Floats, pos: Ints, n_rot: int, first: int, base: float, halves: bool) -> Floats:
    """Elements `first` .. `first + n_rot` of rows [n_tokens, .., n] turned; those that turn together are halves of
    n_rot apart, or neighbours."""
    angle = np.outer(pos, base ** (-np.arange(0, n_rot, 2) / n_rot))
    angle = angle.reshape(len(pos), *(1,) * (x.ndim - 2), -1)
    out, part = x.copy(), x[..., first : first + n_rot]
    a, b = (part[..., : n_rot // 2], part[..., n_rot // 2 :]) if halves else (part[..., ::2], part[..., 1::2])
    turned = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    both = np.concatenate(turned, -1) if halves else np.stack(turned, -1).reshape(part.shape)
    out[..., first : first + n_rot] = both
    return out


def _rms(x: Floats, w: Floats | float, eps: float) -> Floats:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * w


def _soft_max(x: Floats, axis: int) -> Floats:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def _lightning(q: Floats, k: Floats, w: Floats) -> Floats:
    """[n_tokens, n_keys] of q [n_tokens, n_head, n], k [n_keys, n], w [n_tokens, n_head]."""
    return np.einsum("thk,th->tk", np.maximum(np.einsum("thd,kd->thk", q, k), 0), w)


def scores(name: str, model: Model, il: int, cur: Floats) -> Floats:
    """How much each token, or each block of them, is to each token: [n_head of masks, n_tokens, n]. `cur`: float64
    [n_tokens, n_embd], what attention of the layer reads."""
    hp: Any = model.hparams
    n_head, head, n_rot, base = hp.n_indexer_head, hp.n_indexer_embd, hp.n_rot, hp.rope_freq_base
    pos = np.arange(len(cur), dtype=np.int32)
    size = SPARSE[name].size
    blocks = np.arange(len(cur) // size)
    if name in ("minimax-m3-moe", "qwen4exp-moe"):
        q, k = (cur @ _weight(model, f"indexer.{x}_proj", il).T for x in "qk")
        q = _rms(q.reshape(-1, n_head, head), _weight(model, "indexer.q_norm", il), hp.f_norm_rms_eps)
        q, norm = _roped(q, pos, n_rot, 0, base, True), _weight(model, "indexer.k_norm", il)
        if name == "minimax-m3-moe":
            k = _roped(_rms(k, norm, hp.f_norm_rms_eps), pos, n_rot, 0, base, True)
            product = np.where(pos <= pos[:, None], np.einsum("thd,kd->htk", q, k), -np.inf)
            last = -(-len(cur) // size)
            padded = np.pad(product, ((0, 0), (0, 0), (0, last * size - len(cur))), constant_values=-np.inf)
            return padded.reshape(n_head, len(cur), last, size).max(axis=-1)
        k = k[: len(blocks) * size].reshape(-1, size, head).mean(axis=1)
        k = _roped(_rms(k, norm, hp.f_norm_rms_eps), blocks * size, n_rot, 0, base, True)
        return _lightning(q, k, np.ones((len(cur), n_head)))[None]
    row = _rms(cur @ _weight(model, "attn_q_a", il).T, _weight(model, "attn_q_a_norm", il), hp.f_norm_rms_eps)
    q = (row @ _weight(model, "indexer.attn_q_b", il).T).reshape(-1, n_head, head)
    w = cur @ _weight(model, "indexer.proj", il).T / np.sqrt(n_head * head)
    if name == "deepseek4-moe":
        k, gate = (cur @ _weight(model, f"indexer_compressor_{x}", il).T for x in ("kv", "gate"))
        gate = gate + _weight(model, "indexer_compressor_ape", il)[pos % size]
        keys: list[Floats] = []
        for first in blocks * size:
            part, before = slice(first, first + size), slice(max(first - size, 0), first)
            x, g = (np.concatenate([t[before, :head], t[part, head:]]) for t in (k, gate))
            keys.append((_soft_max(g, 0) * x).sum(axis=0))
        k = _rms(np.array(keys), _weight(model, "indexer_compressor_norm", il), hp.f_norm_rms_eps)
        base = hp.rope_freq_base_blocks
        q, k = (_roped(x, p, n_rot, head - n_rot, base, False) for x, p in ((q, pos), (k, blocks * size)))
        return _lightning(q, k, w)[None]
    k = cur @ _weight(model, "indexer.attn_k", il).T
    k = (k - k.mean(axis=1, keepdims=True)) / np.sqrt(k.var(axis=1, keepdims=True) + hp.f_index_norm_eps)
    k = k * _weight(model, "indexer.k_norm", il) + _weight(model, "indexer.k_norm", il, "bias")
    if name == "glm5-next-moe":
        gate = cur @ _weight(model, "indexer_compressor_gate", il).T
        gate = gate + _weight(model, "indexer_compressor_ape", il)[pos % size]
        k, gate = (x[: len(blocks) * size].reshape(-1, size, head) for x in (k, gate))
        return _lightning(q, (_soft_max(gate, 1) * k).sum(axis=1), w)[None]
    first = head - n_rot if name == "hy_v4-moe" else 0
    q, k = (_roped(x, pos, n_rot, first, base, name == "deepseek32-moe") for x in (q, k))
    return _lightning(q, k, w)[None]
