"""RWKV-7, and the Qwen2 models whose attention RWKV replaced, against a forward pass in float64, one token at a time,
written from the papers: arXiv 2503.14456 (section 4), 2404.05892 (section 4) and 2505.03005."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyggml.dtypes import DType
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.model import Model, load_model

from ..random_model import Arrays, random_weights, write_random

A = npt.NDArray[np.float64]
N_EMBD, HEAD, N_LAYER = 32, 8, 3
N_HEAD = N_EMBD // HEAD
EPS = 1e-5
COMMON: dict[str, Any] = {
    "embedding_length": N_EMBD,
    "block_count": N_LAYER,
    "wkv.head_size": HEAD,
    "attention.layer_norm_epsilon": EPS,
}
GOOSE = {
    **COMMON,
    "attention.decay_lora_rank": 6,
    "attention.iclr_lora_rank": 5,
    "attention.value_residual_mix_lora_rank": 4,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "rwkv7": ("rwkv7", {**GOOSE, "attention.gate_lora_rank": 7}),
    "arwkv7": ("arwkv7", GOOSE),
    "arwkv7 gated": ("arwkv7", {**GOOSE, "attention.gate_lora_rank": 7}),
    "rwkv6qwen2": (
        "rwkv6qwen2",
        {**COMMON, "time_mix_extra_dim": 6, "time_decay_extra_dim": 5, "attention.head_count_kv": 2},
    ),
}
OPTIONAL = {
    "arwkv7 gated": tuple(f"blk.{il}.time_mix_g{i}.weight" for il in range(N_LAYER) for i in (1, 2)),
    "rwkv6qwen2": tuple(
        f"blk.{il}.time_mix_{name}"
        for il in range(N_LAYER)
        for name in ("lerp_fused.weight", "key.bias", "value.bias", "receptance.bias")
    ),
}
IDS = [(i * 37 + 11) % 64 for i in range(21)]


def sigmoid(x: A) -> A:
    return 1 / (1 + np.exp(-x))


def layer_norm(x: A, eps: float) -> A:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def rms_norm(x: A) -> A:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)


class Exact:
    """One token after the other, from an empty state. Matrices are as GGUF has them: of ne [in, out]."""

    def __init__(self, kind: str, weights: Arrays) -> None:
        self.kind, self.w = kind, {name: np.asarray(a, np.float64) for name, a in weights.items()}
        self.shift = np.zeros((N_LAYER, 2, N_EMBD))
        self.wkv = np.zeros((N_LAYER, N_HEAD, HEAD, HEAD))  # RWKV-7: value, key; RWKV-6: key, value

    def __call__(self, token: int) -> A:
        x = self.w["token_embd.weight"][token]
        if self.kind == "rwkv7":
            x = self.norm("token_embd_norm", x)
        v_first: A | None = None
        for il in range(N_LAYER):
            x_att = self.norm(f"blk.{il}.attn_norm", x)
            prev, self.shift[il, 0] = self.shift[il, 0].copy(), x_att
            if self.kind == "rwkv6qwen2":
                x = x + self.finch(il, x_att, prev)
            else:
                out, v_first = self.goose(il, x_att, prev, v_first)
                x = x + out
            if self.kind == "rwkv7":
                x_ffn = self.norm(f"blk.{il}.attn_norm_2", x)
                prev, self.shift[il, 1] = self.shift[il, 1].copy(), x_ffn
                k = self.of(il, "channel_mix_key") @ (x_ffn + (prev - x_ffn) * self.of(il, "channel_mix_lerp_k"))
                x = x + self.of(il, "channel_mix_value") @ np.maximum(k, 0) ** 2
            else:
                x_ffn = self.norm(f"blk.{il}.ffn_norm", x)
                gate, up = self.of(il, "ffn_gate") @ x_ffn, self.of(il, "ffn_up") @ x_ffn
                x = x + self.of(il, "ffn_down") @ (gate * sigmoid(gate) * up)
        return self.w.get("output.weight", self.w["token_embd.weight"]) @ self.norm("output_norm", x)

    def norm(self, name: str, x: A) -> A:
        if self.kind == "rwkv7":
            return layer_norm(x, EPS) * self.w[f"{name}.weight"] + self.w.get(f"{name}.bias", 0.0)
        return rms_norm(x) * self.w[f"{name}.weight"]

    def of(self, il: int, name: str, suffix: str = "weight") -> A:
        return self.w[f"blk.{il}.{name}.{suffix}"]

    def goose(self, il: int, x: A, prev: A, v_first: A | None) -> tuple[A, A]:
        def low_rank(name: str, x: A, f: Any = lambda y: y) -> A:
            w0, w1, w2 = (self.of(il, f"time_mix_{name}{i}") for i in range(3))
            return w0 + w2 @ f(w1 @ x)

        mu = self.of(il, "time_mix_lerp_fused").reshape(-1, N_EMBD)
        xr, xw, xk, xv, xa, *xg = (x + (prev - x) * m for m in mu)
        r = (self.of(il, "time_mix_receptance") @ xr).reshape(N_HEAD, HEAD)
        k = self.of(il, "time_mix_key") @ xk
        v = self.of(il, "time_mix_value") @ xv
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * sigmoid(low_rank("v", xv))
        decay = np.exp(-np.exp(-0.5) * sigmoid(low_rank("w", xw, np.tanh))).reshape(N_HEAD, HEAD)
        rate = sigmoid(low_rank("a", xa))
        removal = (k * self.of(il, "time_mix_k_k")).reshape(N_HEAD, HEAD)
        removal /= np.sqrt((removal**2).sum(-1, keepdims=True))
        k = (k * (1 + (rate - 1) * self.of(il, "time_mix_k_a"))).reshape(N_HEAD, HEAD)
        v, rate = v.reshape(N_HEAD, HEAD), rate.reshape(N_HEAD, HEAD)
        y = np.empty((N_HEAD, HEAD))
        for h in range(N_HEAD):
            transition = np.diag(decay[h]) - np.outer(removal[h], rate[h] * removal[h])
            self.wkv[il, h] = self.wkv[il, h] @ transition + np.outer(v[h], k[h])
            y[h] = self.wkv[il, h] @ r[h]
        if self.kind == "rwkv7":
            y = layer_norm(y, 64e-5).reshape(-1) * self.of(il, "time_mix_ln") + self.of(il, "time_mix_ln", "bias")
        bonus = (r * self.of(il, "time_mix_r_k").reshape(N_HEAD, HEAD) * k).sum(-1, keepdims=True) * v
        y = y.reshape(-1) + bonus.reshape(-1)
        if xg:
            y = y * (self.of(il, "time_mix_g2") @ sigmoid(self.of(il, "time_mix_g1") @ xg[0]))
        return self.of(il, "time_mix_output") @ y, v_first

    def finch(self, il: int, x: A, prev: A) -> A:
        lower = np.tanh(self.of(il, "time_mix_w1") @ (x + (prev - x) * self.of(il, "time_mix_lerp_x")))
        w2, mu = self.of(il, "time_mix_w2"), self.of(il, "time_mix_lerp_fused").reshape(5, N_EMBD)
        xw, xk, xv, xr, xg = (
            x + (prev - x) * (m + w @ part) for m, w, part in zip(mu, w2, lower.reshape(5, -1), strict=True)
        )
        r, k, v = (
            (self.of(il, f"time_mix_{name}") @ part + self.of(il, f"time_mix_{name}", "bias")).reshape(-1, HEAD)
            for name, part in (("receptance", xr), ("key", xk), ("value", xv))
        )
        k, v = (np.repeat(t, N_HEAD // len(t), axis=0) for t in (k, v))
        d = self.of(il, "time_mix_decay") + self.of(il, "time_mix_decay_w2") @ np.tanh(
            self.of(il, "time_mix_decay_w1") @ xw
        )
        decay = np.exp(-np.exp(d)).reshape(N_HEAD, HEAD)
        self.wkv[il] = self.wkv[il] * decay[:, :, None] + (k * (1 - decay))[:, :, None] * v[:, None, :]
        y = np.einsum("hk,hkv->hv", r, self.wkv[il]).reshape(-1) / np.sqrt(HEAD)
        return self.of(il, "time_mix_output") @ (y * sigmoid(self.of(il, "time_mix_gate") @ xg))


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, A]:
    """A random model, and the exact logits of IDS."""
    name: str = request.param
    arch, kv = MODELS[name]
    weights = random_weights(arch, kv, ("output.weight", *OPTIONAL.get(name, ())))
    path = write_random(tmp_path_factory.mktemp("rwkv") / "m.gguf", arch, kv, weights)
    exact = Exact(arch, weights)
    return load_model(path, repack=False), np.stack([exact(token) for token in IDS])


def decode(ctx: LlamaContext, ids: list[int], seq: int = 0) -> A:
    batch = Batch.prompt(ids, ctx.memory.seq_pos_max(seq) + 1, seq)
    batch.logits = [True] * len(ids)
    ctx.decode(batch)
    return np.asarray(ctx.logits, np.float64)


def equal(got: A, want: A) -> None:
    assert ((got - want) ** 2).sum() <= 1e-10 * (want**2).sum()


@pytest.mark.parametrize("n_ubatch", [512, 4])
def test_a_prompt_and_single_tokens(case: tuple[Model, A], n_ubatch: int) -> None:
    model, want = case
    assert not model.weights.unused
    ctx = model.new_context(64, n_ubatch=n_ubatch)
    equal(decode(ctx, IDS[:16]), want[:16])
    for i in range(16, len(IDS)):
        equal(decode(ctx, IDS[i : i + 1]), want[i : i + 1])


def test_sequences_of_different_lengths(case: tuple[Model, A]) -> None:
    model, want = case
    ctx = model.new_context(64, n_seq_max=3)
    batch = Batch()
    lengths = (5, 9, 5)
    for seq, n in enumerate(lengths):
        for pos, token in enumerate(IDS[:n]):
            batch.add(token, pos, seq, True)
    ctx.decode(batch)
    first = 0
    for n in lengths:
        equal(np.asarray(ctx.logits[first : first + n], np.float64), want[:n])
        first += n
    equal(decode(ctx, IDS[9:], 1), want[9:])


def test_saved_state(case: tuple[Model, A], tmp_path: Path) -> None:
    model, want = case
    first, second = (model.new_context(64, type_k=DType.F32) for _ in range(2))
    decode(first, IDS[:10])
    first.save_state(tmp_path / "state")
    second.load_state(tmp_path / "state")
    equal(decode(second, IDS[10:]), want[10:])
