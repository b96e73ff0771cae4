"""Hyperparameters and tensor names: defaults, and errors that name the key or the tensor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from pyggml.models.hparams import HParams
from pyggml.models.llama import llama_tensors
from pyggml.models.names import bind_weights, empty_weights, tensor_name

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.tensor import Context

from .conftest import KV, TOKENS

ALL: dict[str, Any] = {**KV, "tokenizer.ggml.tokens": TOKENS}


def read(**changes: object) -> HParams:
    """The hparams of the tiny model with keys changed (None removes one); `__` stands for a dot."""
    kv = {**ALL, **{"llama." + k.replace("__", "."): v for k, v in changes.items()}}
    return HParams.from_kv("llama", {k: v for k, v in kv.items() if v is not None})


def test_defaults_follow_from_the_others() -> None:
    hp = read()
    assert (hp.n_vocab, hp.n_embd, hp.n_layer, hp.n_head, hp.n_head_kv, hp.n_ff) == (259, 32, 2, 4, 2, 64)
    assert (hp.n_embd_head_k, hp.n_embd_head_v, hp.n_rot, hp.n_ctx_orig_yarn) == (8, 8, 8, 128)
    assert (hp.rope_freq_base, hp.rope_freq_scale, hp.yarn_ext_factor, hp.n_expert) == (10000.0, 1.0, 0.0, 0)
    assert hp.f_attention_scale == pytest.approx(1 / math.sqrt(8))
    assert read(attention__head_count_kv=None).n_head_kv == 4


def test_every_key_is_read() -> None:
    hp = read(
        vocab_size=300,
        attention__key_length=16,
        attention__value_length=24,
        rope__dimension_count=16,
        rope__freq_base=500000.0,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=64,
        rope__scaling__attn_factor=0.5,
        rope__scaling__yarn_beta_fast=16.0,
        rope__scaling__yarn_beta_slow=2.0,
        expert_count=8,
        expert_used_count=2,
    )
    assert (hp.n_vocab, hp.n_embd_head_k, hp.n_embd_head_v, hp.n_rot) == (300, 16, 24, 16)
    assert (hp.rope_freq_base, hp.rope_freq_scale, hp.n_ctx_orig_yarn) == (500000.0, 0.25, 64)
    assert (hp.yarn_ext_factor, hp.rope_attn_factor, hp.yarn_beta_fast, hp.yarn_beta_slow) == (1.0, 0.5, 16.0, 2.0)
    assert (hp.n_expert, hp.n_expert_used) == (8, 2)
    n = hp.layer(1)
    assert (n.n_embd_q, n.n_embd_k_gqa, n.n_embd_v_gqa, n.n_embd_out) == (64, 32, 48, 96)


def test_scaling() -> None:
    assert read(rope__scaling__factor=2.0).rope_freq_scale == 0.5  # linear is the default kind
    assert read(rope__scale_linear=2.0).rope_freq_scale == 0.5
    assert read(rope__scaling__type="none", rope__scaling__factor=2.0).rope_freq_scale == 1.0


def test_per_layer_arrays() -> None:
    hp = read(attention__head_count_kv=np.array([2, 1], np.int32), feed_forward_length=np.array([64, 64], np.uint32))
    assert hp.n_head_kv == (2, 1) and hp.n_ff == 64
    assert (hp.layer(0).n_embd_k_gqa, hp.layer(1).n_embd_k_gqa) == (16, 8)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"embedding_length": None}, r"llama\.embedding_length is missing"),
        ({"attention__layer_norm_rms_epsilon": None}, r"layer_norm_rms_epsilon is missing"),
        ({"block_count": "two"}, r"llama\.block_count must be an integer"),
        ({"block_count": True}, r"llama\.block_count must be an integer"),
        ({"block_count": 1 << 40}, r"llama\.block_count must be an integer"),
        ({"block_count": 100000}, r"n_layer = 100000: more than the 512"),
        ({"block_count": 0}, r"n_layer = 0"),
        ({"attention__head_count": 0}, r"head_count must be a positive integer"),
        ({"attention__head_count_kv": 3}, r"n_head_kv = 3: n_head 4 is no multiple"),
        ({"attention__head_count_kv": np.array([2, 2, 2])}, r"n_head_kv = 3 values: there are 2 layers"),
        ({"attention__head_count_kv": np.array([2.0, 2.0])}, r"head_count_kv must hold positive integers"),
        ({"attention__head_count": 5, "attention__head_count_kv": 5}, r"n_embd 32 is no multiple"),
        ({"rope__dimension_count": 7}, r"n_rot = 7: it must be even"),
        ({"rope__dimension_count": 64}, r"n_rot = 64: .* at most n_embd_head_k 8"),
        ({"rope__freq_base": math.nan}, r"rope\.freq_base must be a finite number"),
        ({"rope__scaling__type": "dynamic"}, r"rope\.scaling\.type is 'dynamic'"),
        ({"expert_count": 8}, r"n_expert_used = 0: there are 8 experts"),
        ({"expert_count": 8, "expert_used_count": 9}, r"n_expert_used = 9"),
        ({"expert_count": 100000, "expert_used_count": 1}, r"n_expert = 100000"),
    ],
)
def test_bad_keys_are_named(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        read(**changes)


def test_no_vocabulary_at_all() -> None:
    with pytest.raises(ModelError, match=r"llama\.vocab_size is missing"):
        HParams.from_kv("llama", KV)


def test_names() -> None:
    assert tensor_name("attn_q", 3) == "blk.3.attn_q.weight"
    assert tensor_name("ffn_down", 0, "bias") == "blk.0.ffn_down.bias"
    assert tensor_name("output_norm") == "output_norm.weight"
    names = [s.name for s in llama_tensors(read())]
    assert len(names) == len(set(names))


def test_experts_replace_the_dense_feed_forward_network() -> None:
    specs = {s.name: s.ne for s in llama_tensors(read(expert_count=8, expert_used_count=2))}
    assert specs["blk.1.ffn_down_exps.weight"] == (64, 32, 8)
    assert specs["blk.0.ffn_gate_inp.weight"] == (32, 8)
    assert "blk.0.ffn_up.weight" not in specs


def test_missing_and_misshaped_tensors_are_named() -> None:
    specs = list(llama_tensors(read()))
    weights = empty_weights(specs)
    assert bind_weights(specs, weights) == weights
    with pytest.raises(ModelError, match=r"no tensor blk\.1\.attn_v\.weight \(expected ne \[32, 16\]\)"):
        bind_weights(specs, {k: t for k, t in weights.items() if k != "blk.1.attn_v.weight"})
    bad = Context().new_tensor(DType.F16, (32, 17))
    with pytest.raises(ModelError, match=r"blk\.0\.attn_k\.weight has ne \[32, 17, 1, 1\].*\[32, 16, 1, 1\]"):
        bind_weights(specs, {**weights, "blk.0.attn_k.weight": bad})
    wrong_bias = Context().new_tensor(DType.F32, (31,))
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias has ne \[31"):
        bind_weights(specs, {**weights, "blk.0.attn_q.bias": wrong_bias})
    assert "output.weight" not in bind_weights(specs, {k: t for k, t in weights.items() if k != "output.weight"})
