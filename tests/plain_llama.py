"""A llama model in NumPy and float64, straight from its definition: what caches and graphs are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
from pyggml.models.memory.kv_cells import KVCells, SeqSets, Slot

from pyggml.llm.model import Model
from pyggml.types import Ints

Array = np.ndarray[Any, np.dtype[Any]]


class Plain:
    """The tiny model of conftest (heads of 8, two of Q to one of K and V); each call computes all anew."""

    def __init__(self, model: Model) -> None:
        self.w = {name: t.numpy().astype(np.float64) for name, t in model.tensors.items()}
        self.n_layer = model.hparams.n_layer

    def norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * self.w[name]

    def rope(self, x: Array, pos: Array) -> Array:
        """x: [n, heads, 8]; neighbours turn by pos * 10000^(-2i / 8)."""
        angle = pos[:, None, None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)
        return np.stack((z.real, z.imag), axis=-1).reshape(x.shape)

    def logits(self, tokens: Array, pos: Array) -> Array:
        """[n, n_vocab] of tokens that see those not after them, and themselves."""
        n, w = len(tokens), self.w
        x = w["token_embd.weight"][tokens]
        hidden = pos[:, None] < pos
        for il in range(self.n_layer):
            cur = self.norm(x, f"blk.{il}.attn_norm.weight")
            q, k, v = ((cur @ w[f"blk.{il}.attn_{c}.weight"].T).reshape(n, -1, 8) for c in "qkv")
            k, v = (np.repeat(a, 2, axis=1) for a in (self.rope(k, pos), v))
            kq = np.einsum("ihd,jhd->hij", self.rope(q, pos), k) / np.sqrt(8)
            kq = np.exp(np.where(hidden, -np.inf, kq))
            kq /= kq.sum(axis=-1, keepdims=True)
            x = x + np.einsum("hij,jhd->ihd", kq, v).reshape(n, -1) @ w[f"blk.{il}.attn_output.weight"].T
            cur = self.norm(x, f"blk.{il}.ffn_norm.weight")
            gate, up = (cur @ w[f"blk.{il}.ffn_{c}.weight"].T for c in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{il}.ffn_down.weight"].T
        return self.norm(x, "output_norm.weight") @ w["output.weight"].T


def nmse(a: Array, b: Array) -> float:
    return float(((a - b) ** 2).sum() / (b**2).sum())


def take(cells: KVCells, pos: Ints, seq: Ints, sets: SeqSets | None = None) -> Slot:
    """The slot that tokens were put into."""
    slot = cells.slot_of(len(pos), seq, sets)
    cells.hold(slot, pos, seq, sets)
    return slot
