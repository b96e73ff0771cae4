"""Hyperparameters and tensor names: defaults, and errors that name the key or the tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
import pytest
from pyggml.models import get_architecture
from pyggml.models.hparams import HParams, LayerShape
from pyggml.models.metadata import Reader, read_hparams
from pyggml.models.names import tensor_name
from pyggml.models.weights import ShapeOnlyWeights, TensorSpec, Weights

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.tensor import Context, Tensor

from ..tiny_model import KV, TOKENS

LLAMA = get_architecture("llama")
ALL: dict[str, Any] = {**KV, "tokenizer.ggml.tokens": TOKENS}


def read(**changes: object) -> HParams:
    """The hparams of the tiny model with keys changed (None removes one); `__` stands for a dot."""
    kv = {**ALL, **{"llama." + k.replace("__", "."): v for k, v in changes.items()}}
    return LLAMA.hparams("llama", {k: v for k, v in kv.items() if v is not None})


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
        ({"block_count": 100000}, r"block_count is 100000: more than the 512 layers"),
        ({"block_count": 0}, r"n_layer = 0"),
        ({"attention__head_count": 0}, r"head_count must be a positive integer"),
        ({"attention__head_count_kv": 3}, r"n_head_kv = 3: n_head 4 is no multiple"),
        ({"attention__head_count_kv": np.array([2, 2, 2])}, r"n_head_kv = 3 values: there are 2 layers"),
        ({"attention__head_count_kv": np.array([2.0, 2.0])}, r"head_count_kv must hold whole numbers"),
        ({"attention__head_count": 5, "attention__head_count_kv": 5}, r"n_embd 32 is no multiple"),
        ({"rope__dimension_count": 7}, r"n_rot = 7: it must be even"),
        ({"rope__dimension_count": 64}, r"n_rot = 64: .* at most n_embd_head_k 8"),
        ({"rope__freq_base": math.nan}, r"rope\.freq_base must be a finite number"),
        ({"rope__freq_base": -1.0}, r"rope_freq_base = -1\.0: it must be positive"),
        ({"rope__scaling__factor": 1e-300}, r"rope_freq_scale = .*: .* an f32"),
        ({"rope__scaling__yarn_beta_slow": 0.0}, r"yarn_beta_slow = 0\.0: it must be positive"),
        ({"attention__scale": 1e39}, r"f_attention_scale = 1e\+39: it must be an f32"),
        ({"attention__layer_norm_rms_epsilon": -1e-5}, r"f_norm_rms_eps = -1e-05: it must not be negative"),
        ({"rope__scaling__type": "dynamic"}, r"rope\.scaling\.type is 'dynamic'"),
        ({"attention__causal": 1}, r"attention\.causal must be true or false"),
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
        LLAMA.hparams("llama", KV)


def asked(*optional: str, **changes: object) -> dict[str, TensorSpec]:
    """What the builder asks for, of a model with those optional tensors."""
    return LLAMA.declare(read(**changes), ShapeOnlyWeights(optional)).asked


@dataclass(frozen=True, kw_only=True)
class Family(HParams):
    """Of a family with a hyperparameter of its own, and another rule for one of all."""

    n_lora_kv: int = 0

    def layer(self, il: int) -> LayerShape:
        return super().layer(il)._replace(n_embd_k_gqa=self.n_lora_kv)


def test_a_family_keeps_its_own_hyperparameters() -> None:
    kv = {**ALL, "llama.attention.kv_lora_rank": 12}
    r = Reader("llama", kv)
    hp = read_hparams(Family, r, n_lora_kv=r.integer(gguf.Keys.Attention.KV_LORA_RANK), rope_type="neox")
    assert (hp.n_lora_kv, hp.n_embd, hp.rope_type) == (12, 32, "neox")
    assert (hp.layer(1).n_embd_k_gqa, hp.layer(1).n_embd_v_gqa) == (12, 16)
    with pytest.raises(ModelError, match=r"key llama\.attention\.q_lora_rank is missing"):
        r.integer(gguf.Keys.Attention.Q_LORA_RANK)
    with pytest.raises(ModelError, match=r"llama\.attention\.layer_norm_epsilon is missing"):
        read_hparams(Family, r, "layer")


def test_names() -> None:
    assert tensor_name("attn_q", 3) == "blk.3.attn_q.weight"
    assert tensor_name("ffn_down", 0, "bias") == "blk.0.ffn_down.bias"
    assert tensor_name("output_norm") == "output_norm.weight"
    assert tensor_name("enc.attn_q", 1) == "enc.blk.1.attn_q.weight"
    for name in gguf.TENSOR_NAMES.values():  # all of text models
        if name.startswith(("blk.{bid}.", "enc.", "dec.")) or ("{bid}" not in name and "." not in name):
            role, il = name.replace("blk.{bid}.", ""), 7 if "{bid}" in name else -1
            assert tensor_name(role, il, "") == name.format(bid=il)
    assert (tensor_name("new", 2), tensor_name("new")) == ("blk.2.new.weight", "new.weight")  # not in gguf's tables yet


def test_what_the_builder_asks_for() -> None:
    specs = asked()
    assert next(iter(specs)) == "token_embd.weight" and len(specs) == 1 + 4 + 2 * (9 + 10) + 3 + 7  # 7: heads
    assert specs["blk.1.attn_v.weight"] == ("blk.1.attn_v.weight", (32, 16), False)
    assert specs["blk.1.attn_v.bias"] == ("blk.1.attn_v.bias", (16,), True)
    assert specs["output.weight"].optional and not specs["token_embd.weight"].optional
    assert specs == asked("output.weight", "rope_freqs.weight", "blk.0.attn_q.bias")


def test_experts_replace_the_dense_feed_forward_network() -> None:
    specs = asked(expert_count=8, expert_used_count=2)
    assert specs["blk.1.ffn_down_exps.weight"].ne == (64, 32, 8)
    assert specs["blk.0.ffn_gate_inp.weight"].ne == (32, 8)
    assert "blk.0.ffn_up.weight" not in specs


def test_missing_misshaped_and_unused_tensors_are_named() -> None:
    hp = read()
    tensors = dict(LLAMA.declare(hp, ShapeOnlyWeights()))

    def declare(drop: str = "", **changes: Tensor) -> Weights:
        kept = {name: t for name, t in tensors.items() if name != drop}
        return LLAMA.declare(hp, Weights({**kept, **{k.replace("__", "."): t for k, t in changes.items()}}))

    assert dict(declare()) == tensors and not declare().unused
    with pytest.raises(ModelError, match=r"no tensor blk\.1\.attn_v\.weight \(expected ne \[32, 16\]\)"):
        declare("blk.1.attn_v.weight")
    ctx = Context()
    bad = ctx.new_tensor(DType.F16, (32, 17))
    with pytest.raises(ModelError, match=r"blk\.0\.attn_k\.weight has ne \[32, 17, 1, 1\].*\[32, 16, 1, 1\]"):
        declare(blk__0__attn_k__weight=bad)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias has ne \[31"):
        declare(blk__0__attn_q__bias=ctx.new_tensor(DType.F32, (31,)))
    assert "output.weight" not in declare("output.weight")
    odd = declare(blk__0__attn_kk__weight=bad)
    assert odd.unused == ["blk.0.attn_kk.weight"] and "blk.0.attn_kk.weight" not in odd
