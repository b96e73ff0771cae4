"""The forward pass of a head that drafts, in float64, after the papers: DeepSeek-V3 (arXiv 2412.19437, 2.2) and the
layers of the families that have one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.floating[Any]]
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Family:
    """What differs. Norms behind attention and network (`post`), the name of that before the network, elements that are
    roped, and whether those that turn together are halves apart (`neox`); ... `gate`: Q has one beside it;
    `latent`: (n_lora_kv, n_rot) of latent attention, and `head_gate`: with a gate for each head. `relu_sqr`: networks
    have no gate; experts read and give fewer elements where there are weights for that."""

    n_head: int = 4
    neox: bool = True
    n_rot: int = 8
    window: int = 0
    ffn_norm: str = "ffn_norm"
    post: bool = False
    gate: bool = False
    parallel: bool = False
    latent: tuple[int, int] | None = None
    head_gate: bool = False
    relu_sqr: bool = False
    softmax: bool = False
    attn_scale: float = 1.0
    logit_scale: float = 1.0
    expert_scale: float = 1.5
    normed: bool = True  # what goes on to the next guess


def rms(x: Array, w: Array) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def rope(x: Array, pos: Array, n_rot: int, neox: bool) -> Array:
    """x [n, heads, d]: the first n_rot elements turn."""
    out, half = x.copy(), n_rot // 2
    angle = pos[:, None] * 10000.0 ** (-2 * np.arange(half) / n_rot)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = (slice(0, half), slice(half, n_rot)) if neox else (slice(0, n_rot, 2), slice(1, n_rot, 2))
    out[..., a], out[..., b] = x[..., a] * cos - x[..., b] * sin, x[..., a] * sin + x[..., b] * cos
    return out


def attend(q: Array, k: Array, v: Array, window: int) -> Array:
    """q [n, heads, d], k and v [n, fewer heads, d]; the scores over the root of q's d: [n, heads * d]."""
    n, n_head, d = q.shape
    k, v = (np.repeat(t, n_head // t.shape[1], axis=1) for t in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(d)
    i, j = np.arange(n)[:, None], np.arange(n)[None, :]
    scores = np.where((j > i) | (window > 0) & (i - j >= window), -np.inf, scores)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v).reshape(n, -1)


class PlainHead:
    """The head whose weights are those of block `il`, or the model's where it has none of its own."""

    def __init__(self, weights: Mapping[str, Array], il: int, family: Family) -> None:
        self.all = {k: np.asarray(v, np.float64) for k, v in weights.items()}
        self.w = {k[len(f"blk.{il}.") :]: v for k, v in self.all.items() if k.startswith(f"blk.{il}.")}
        self.of = family

    def __call__(self, tokens: Array, hidden: Array) -> tuple[Array, Array]:
        """Logits [n, n_vocab] behind tokens [n] with the hidden states [n, n_embd] before them; and those after."""
        w, of, every = self.w, self.of, self.all
        embd = w.get("nextn.embed_tokens.weight", every["token_embd.weight"])[tokens]
        both = (rms(embd, w["nextn.enorm.weight"]), rms(hidden, w["nextn.hnorm.weight"]))
        x = np.concatenate(both, axis=1) @ w["nextn.eh_proj.weight"].T
        normed = rms(x, w["attn_norm.weight"])
        attn = (self.latent(normed) if of.latent else self.attention(normed)) @ w["attn_output.weight"].T
        attn = attn * of.attn_scale
        if of.parallel:
            x = x + attn + self.ffn(normed)
        else:
            x = x + (rms(attn, w["post_attention_norm.weight"]) if of.post else attn)
            ffn = self.ffn(rms(x, w[f"{of.ffn_norm}.weight"]))
            x = x + (rms(ffn, w["post_ffw_norm.weight"]) if of.post else ffn)
        norm = w.get("nextn.shared_head_norm.weight", w.get("layer_output_norm.weight", every["output_norm.weight"]))
        after = rms(x, norm)
        output = w.get("nextn.shared_head_head.weight", every["output.weight"])
        return after @ output.T * of.logit_scale, after if of.normed else x

    def attention(self, x: Array) -> Array:
        w, of, n, pos = self.w, self.of, len(x), np.arange(len(x))
        q, k, v = (x @ w[f"attn_{name}.weight"].T for name in "qkv")
        gate = np.ones(1)
        if of.gate:
            q = q.reshape(n, of.n_head, 2, -1)
            q, gate = q[:, :, 0], sigmoid(q[:, :, 1].reshape(n, -1))
        q = q.reshape(n, of.n_head, -1)
        k = k.reshape(n, -1, q.shape[2])
        if "attn_q_norm.weight" in w:
            q, k = rms(q, w["attn_q_norm.weight"]), rms(k, w["attn_k_norm.weight"])
        q, k = (rope(t, pos, of.n_rot, of.neox) for t in (q, k))
        return attend(q, k, v.reshape(n, k.shape[1], -1), of.window) * gate

    def latent(self, x: Array) -> Array:
        """K and V of each head come from one row; the last elements of K are roped, and those of all heads."""
        assert self.of.latent is not None
        w, of, n, pos, (rank, n_rot) = self.w, self.of, len(x), np.arange(len(x)), self.of.latent
        q = rms(x @ w["attn_q_a.weight"].T, w["attn_q_a_norm.weight"]) @ w["attn_q_b.weight"].T
        q = q.reshape(n, of.n_head, -1)
        row = x @ w["attn_kv_a_mqa.weight"].T
        c = rms(row[:, :rank], w["attn_kv_a_norm.weight"])
        k_rot = np.repeat(rope(row[:, None, rank:], pos, n_rot, of.neox), of.n_head, axis=1)
        k = np.concatenate((np.einsum("hcd,nc->nhd", w["attn_k_b.weight"], c), k_rot), axis=2)
        q = np.concatenate((q[..., :-n_rot], rope(q[..., -n_rot:], pos, n_rot, of.neox)), axis=2)
        out = attend(q, k, np.einsum("hdc,nc->nhd", w["attn_v_b.weight"], c), 0)
        if of.head_gate:
            gate = sigmoid(x @ w["attn_gate.weight"].T)
            out = out * np.repeat(gate, out.shape[1] // of.n_head, axis=1)
        return out

    def network(self, x: Array, kind: str = "", expert: int | None = None) -> Array:
        up, down = self.w[f"ffn_up{kind}.weight"], self.w[f"ffn_down{kind}.weight"]
        if self.of.relu_sqr:
            up, down = (up, down) if expert is None else (up[expert], down[expert])
            return np.maximum(x @ up.T, 0) ** 2 @ down.T
        if f"ffn_gate{kind}.weight" not in self.w:  # the first half of what `up` gives
            gate, up = np.split(up, 2)
        else:
            gate = self.w[f"ffn_gate{kind}.weight"]
        if expert is not None:
            gate, up, down = gate[expert], up[expert], down[expert]
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def ffn(self, x: Array) -> Array:
        """The network, or 2 of the experts, weighted by what the router gives, and one that all share."""
        w, of = self.w, self.of
        if "ffn_gate_inp.weight" not in w:
            return self.network(x)
        logits = x @ w["ffn_gate_inp.weight"].T
        probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) if of.softmax else sigmoid(logits)
        best = np.argsort(-(probs + w.get("exp_probs_b.bias", 0.0)), axis=1)[:, :2]
        read = x @ w["ffn_latent_down.weight"].T if "ffn_latent_down.weight" in w else x
        out = np.zeros_like(read)
        for i, ids in enumerate(best):
            for e in ids:
                out[i] += of.expert_scale * probs[i, e] / probs[i, ids].sum() * self.network(read[i], "_exps", e)
        out = out @ w["ffn_latent_up.weight"].T if "ffn_latent_up.weight" in w else out
        shared = self.network(x, "_shexp")
        if "ffn_gate_inp_shexp.weight" in w:
            shared = shared * sigmoid(x @ w["ffn_gate_inp_shexp.weight"].reshape(1, -1).T)
        return (out + shared) * (0.5 if of.parallel else 1.0)
