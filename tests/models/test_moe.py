"""Routers and experts against NumPy, by every rule that a model may have."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyggml.models import get_architecture
from pyggml.models.blocks import Build, build_experts, build_router
from pyggml.models.hparams import HParams, Router
from pyggml.models.weights import Weights

import pyggml as gg
from pyggml.errors import ModelError

Floats = npt.NDArray[np.floating[Any]]
N_EMBD, N_FF, N_TOKENS = 8, 12, 5
SIZES = {"n_vocab": 16, "n_embd": N_EMBD, "n_layer": 1, "n_head": 1, "n_ff": N_FF, "n_ctx_train": 8}


def make(ctx: gg.Context, weights: dict[str, Floats], **hparams: Any) -> Build:
    """A graph in the making, of a model with these weights of its layer 0, NumPy order."""
    tensors = {f"blk.0.{k}": ctx.from_numpy(v.astype(np.float32), name=f"blk.0.{k}") for k, v in weights.items()}
    hp = HParams(**{**SIZES, **hparams})
    memory = get_architecture("llama").new_memory(hp, 32)
    return Build(hp, Weights(tensors), memory, N_TOKENS, 1, (32,))


def run(*out: gg.Tensor) -> list[Floats]:
    graph = gg.Graph()
    for t in out:
        graph.build_forward_expand(t.set_output())
    gg.compute(graph)
    return [np.array(t.numpy(), np.float64 if t.dtype is gg.F32 else None) for t in out]


def gated(x: Floats, gating: str) -> Floats:
    if gating == "softmax":
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    return 1 / (1 + np.exp(-x)) if gating == "sigmoid" else np.sqrt(np.log1p(np.exp(x)))


def routed(logits: Floats, rule: Router, bias: Floats | float, n_used: int) -> tuple[npt.NDArray[Any], Floats]:
    """The rules as papers have them, a token at a time."""
    chosen, weights = [], []
    for x in logits:
        probs = x if rule.of_selected else gated(x, rule.gating)
        by = probs + bias
        if rule.n_group > 1:
            groups = by.reshape(rule.n_group, -1)
            best = np.argsort(-np.sort(groups)[:, -2:].sum(1))[: rule.n_group_used]
            by = np.where(np.isin(np.arange(rule.n_group), best)[:, None], groups, -np.inf).ravel()
        ids = np.argsort(-by)[:n_used]
        w = gated(probs[ids], rule.gating) if rule.of_selected else probs[ids]
        w = w / max(w.sum(), 2.0**-14) if rule.norm else w
        chosen.append(ids)
        weights.append(w * (rule.scale or 1.0))
    return np.array(chosen), np.array(weights)


RULES = st.builds(
    Router,
    gating=st.sampled_from(("softmax", "sigmoid", "sqrt_softplus")),
    of_selected=st.booleans(),
    norm=st.booleans(),
    scale=st.sampled_from((0.0, 2.5)),
    n_group=st.sampled_from((0, 1, 4)),
    n_group_used=st.integers(1, 3),
)


@given(rule=RULES, n_used=st.integers(1, 4), bias=st.sampled_from((None, "bias", "")), seed=st.integers(0, 2**32 - 1))
@example(Router(gating="softmax", norm=True), 1, "bias", 143)  # it chooses an expert of next to no probability
@settings(max_examples=60)
def test_router(rule: Router, n_used: int, bias: str | None, seed: int) -> None:
    if rule.n_group > 1:
        n_used = min(n_used, 2 * rule.n_group_used)
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((N_TOKENS, N_EMBD)), rng.standard_normal((8, N_EMBD))
    weights: dict[str, Floats] = {"ffn_gate_inp.weight": w}
    if bias is not None:
        weights[f"exp_probs_b.{bias}".rstrip(".")] = rng.standard_normal(8)
    with gg.Context() as ctx:
        b = make(ctx, weights, n_expert=8, n_expert_used=n_used, router=rule)
        selected, got = run(*build_router(b, ctx.from_numpy(x.astype(np.float32)), 0))
    logits = (x.astype(np.float32) @ w.astype(np.float32).T).astype(np.float64)
    added = next((v.astype(np.float32) for k, v in weights.items() if k.startswith("exp")), 0.0)
    ids, want = routed(logits, rule, added, n_used)
    np.testing.assert_array_equal(selected, ids)
    np.testing.assert_allclose(got[..., 0], want, rtol=1e-5, atol=1e-6)


def silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


FORMS = ("plain", "bias", "scale", "weights first", "clamped", "one")


@pytest.mark.parametrize(
    ("form", "merged"), [("no gate", False), *((form, merged) for form in FORMS for merged in (False, True))]
)
def test_experts(form: str, merged: bool) -> None:
    """down(silu(gate) * up) of each selected expert, with what a model may have besides, in one weight or in two."""
    rng = np.random.default_rng(0)
    n_expert, n_used = 6, 1 if form == "one" else 3
    x = rng.standard_normal((N_TOKENS, N_EMBD))
    ids = np.array([rng.permutation(n_expert)[:n_used] for _ in range(N_TOKENS)], np.int32)
    share = rng.random((N_TOKENS, n_used, 1))
    gate, up = rng.standard_normal((2, n_expert, N_FF, N_EMBD))
    down = rng.standard_normal((n_expert, N_EMBD, N_FF))
    gate_b, up_b = rng.standard_normal((2, n_expert, N_FF)) if form == "bias" else np.zeros((2, n_expert, N_FF))
    down_b = rng.standard_normal((n_expert, N_EMBD)) * (form == "bias")
    scale = rng.random(n_expert) if form == "scale" else np.ones(n_expert)
    weights: dict[str, Floats] = {"ffn_down_exps.weight": down}
    if merged:
        weights["ffn_gate_up_exps.weight"] = np.concatenate([gate, up], 1)
        weights["ffn_gate_up_exps.bias"] = np.concatenate([gate_b, up_b], 1)
    else:
        weights |= {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
        weights |= {"ffn_gate_exps.bias": gate_b, "ffn_up_exps.bias": up_b}
    weights |= {"ffn_down_exps.bias": down_b, "ffn_down_exps.scale": scale}
    options: dict[str, Any] = {"gated": form != "no gate", "weights_first": form == "weights first"}
    act: Any = partial(gg.ops.swiglu_clamp, limit=0.5) if form == "clamped" else "silu"
    with gg.Context() as ctx:
        b = make(ctx, weights, n_expert=n_expert, n_expert_used=n_used)
        inputs = [ctx.from_numpy(a) for a in (x.astype(np.float32), ids, share.astype(np.float32))]
        (got,) = run(build_experts(b, *inputs, N_FF, 0, act, **options))
    want = np.zeros_like(x)
    for (t, i), e in np.ndenumerate(ids):
        s = share[t, i, 0]
        cur = x[t] * (s if form == "weights first" else 1.0)
        g, u = gate[e] @ cur + gate_b[e], up[e] @ cur + up_b[e]
        if form == "clamped":
            g, u = np.minimum(g, 0.5), np.clip(u, -0.5, 0.5)
        out = down[e] @ (silu(u) if form == "no gate" else silu(g) * u) * scale[e] + down_b[e]
        want[t] += out * (1.0 if form == "weights first" else s)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Router(n_group=3, n_group_used=1), "expert_group_count = 3"),
        (Router(n_group=8, n_group_used=1), "expert_group_count = 8"),
        (Router(n_group=4, n_group_used=0), "expert_group_used_count = 0"),
        (Router(n_group=4, n_group_used=1), "they have no 3 experts"),
        (Router(scale=float("inf")), "expert_weights_scale = inf"),
    ],
)
def test_rules_that_contradict_the_experts(rule: Router, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        HParams(**SIZES, n_expert=8, n_expert_used=3, router=rule)


KEYS = {  # of a DeepSeek-V3-like file
    "context_length": 64, "embedding_length": 8, "block_count": 5, "feed_forward_length": 24, "vocab_size": 16,
    "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-6, "expert_count": 8, "expert_used_count": 2,
    "expert_feed_forward_length": 12, "expert_shared_count": 2, "leading_dense_block_count": 1, "expert_gating_func": 2,
    "expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_group_count": 4, "expert_group_used_count": 2,
    "nextn_predict_layers": 1, "interleave_moe_layer_step": 2,
}  # fmt: skip


def read(arch: str = "dots1", **keys: Any) -> HParams:
    return get_architecture(arch).hparams(arch, {f"{arch}.{k}": v for k, v in {**KEYS, **keys}.items()})


def test_keys() -> None:
    hp = read()
    assert hp.router == Router(gating="sigmoid", norm=True, scale=2.5, n_group=4, n_group_used=2)
    assert (hp.n_layer, hp.layer(1).n_ff, hp.layer(1).n_ff_exp, hp.n_ff_shexp) == (4, 24, 12, 24)
    assert [hp.is_moe(il) for il in range(4)] == [False, True, False, True]
    assert read(expert_gating_func=3).router.of_selected
    old = {k: v for k, v in KEYS.items() if k != "expert_feed_forward_length" and "shared" not in k}
    hp = get_architecture("qwen2moe").hparams("qwen2moe", {f"qwen2moe.{k}": v for k, v in old.items()})
    assert (hp.layer(1).n_ff_exp, hp.n_ff_shexp) == (12, 24)


@pytest.mark.parametrize(
    ("arch", "keys", "message"),
    [
        ("dots1", {"expert_gating_func": 5}, r"dots1\.expert_gating_func is 5; known are 1 to 4"),
        ("dots1", {"expert_feed_forward_length": np.array([12, -1])}, r"dots1\.expert_feed_forward_length must hold"),
        ("dots1", {"expert_feed_forward_length": np.array([12, 12])}, "n_ff_exp = 2 values: there are 4 layers"),
        ("dots1", {"expert_used_count": 9}, "n_expert_used = 9: there are 8 experts"),
        ("dots1", {"interleave_moe_layer_step": 0}, "n_moe_layer_step = 0"),
        ("maple", {"attention.sliding_window": 8}, r"maple\.swiglu_clamp_exp is missing"),
        ("maple", {"attention.sliding_window": 8, "swiglu_clamp_exp": np.ones(2)}, "must hold 5 finite numbers"),
        ("grovemoe", {"experts_per_group": 3, "expert_group_scale": 1.0}, "make no groups of experts_per_group 3"),
        ("granite", {"logit_scale": 0.0}, r"granite\.logit_scale must not be 0"),
        ("dbrx", {"attention.layer_norm_epsilon": 1e-5}, r"dbrx\.attention\.clamp_kqv is missing"),
    ],
)
def test_bad_keys(arch: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(arch, **keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"block_size": 0}, r"indexer\.block_size must not be 0"),
        ({"local_blocks": 17}, r"indexer\.local_blocks is 17, more than the 16 blocks"),
        ({"local_blocks": 0}, r"indexer\.local_blocks must not be 0"),
        ({"head_count": 4}, r"indexer\.head_count is 4, not one for each head of K"),
        ({"key_length": 2}, "heads of 2 of the indexer have no 4 elements to rope"),
        ({"top_k": 0}, "chooses 0|more than the 0 blocks"),
        ({"types": np.array([1, 1])}, "indexers are told of 2 layers; there are 4"),
    ],
)
def test_bad_indexers(keys: dict[str, Any], message: str) -> None:
    good = {"head_count": 2, "key_length": 8, "top_k": 16, "block_size": 4}
    with pytest.raises(ModelError, match=message):
        read("minimax-m3", **{f"attention.indexer.{k}": v for k, v in {**good, **keys}.items()})
