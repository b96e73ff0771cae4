"""Models with some layers of attention and some of linear attention (gated delta rules)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..config import Config
from ..family import Family, Key, Of
from ..metadata import dense_back, dense_lead, layers_of, of_model
from ..moves import A_LOG, CONV1D, KV_B, PLUS_ONE, ROW, Merged, Move, Shape, Sizes
from .mla import INNER_EPS, NOPE_AND_ROPE
from .spelling import BLOCK_SPARSE, mtp_layers, shared

Array = npt.NDArray[Any]
_NORMS = {
    f"{role}.weight": PLUS_ONE
    for role in (
        *("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm"),
        *("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm"),
    )
}
_DT_BIAS = {r"\.dt_bias$": ".dt_proj.bias"}


def _kinds(s: Sizes) -> tuple[int, int, int]:
    """The number of heads of Q and K, elements of such a head, and elements of V for each of them."""
    n_k = s.ints("ssm.group_count")
    return n_k, s.ints("ssm.state_size"), s.ints("ssm.inner_size") // n_k


def _qkvz_there(a: Array, s: Sizes) -> list[Array]:
    n_k, d_k, d_v = _kinds(s)
    rows = a.reshape(n_k, 2 * d_k + 2 * d_v, -1)
    cuts = (0, d_k, 2 * d_k, 2 * d_k + d_v, 2 * d_k + 2 * d_v)
    q, k, v, z = (rows[:, i:j].reshape(-1, a.shape[1]) for i, j in pairwise(cuts))
    return [np.concatenate((q, k, v)), z]


def _qkvz_back(parts: list[Array], s: Sizes) -> Array:
    n_k, d_k, d_v = _kinds(s)
    qkv, z = parts
    cuts = (0, n_k * d_k, 2 * n_k * d_k, 2 * n_k * d_k + n_k * d_v)
    rows = [qkv[i:j].reshape(n_k, (j - i) // n_k, -1) for i, j in pairwise(cuts)]
    return np.concatenate([*rows, z.reshape(n_k, d_v, -1)], 1).reshape(-1, qkv.shape[1])


def _qkvz_shapes(shape: tuple[int, ...], s: Sizes) -> list[tuple[int, ...]]:
    n_k, d_k, d_v = _kinds(s)
    return [(n_k * (2 * d_k + d_v), shape[1]), (n_k * d_v, shape[1])]


QKVZ = Merged(("attn_qkv", "attn_gate"), _qkvz_there, _qkvz_back, _qkvz_shapes)


def _tiled(first: bool = False, columns: bool = False) -> Move:
    """Reorder heads of V. A checkpoint has them by the head of K that they share. A GGUF has first the first V head of
    every K head, then all second ones, which is the order that repeating all of K's heads gives. `first(sizes)`: rows
    of Q and K that come before; `columns`: reorder columns instead of rows."""

    def order(a: Array, s: Sizes, there: bool) -> Array:
        n_k, n_v = s.ints("ssm.group_count"), s.ints("ssm.time_step_rank")
        a = np.moveaxis(a, -1, 0) if columns else a
        skip = 2 * n_k * s.ints("ssm.state_size") if first else 0
        grid = (n_k, n_v // n_k) if there else (n_v // n_k, n_k)
        v = a[skip:]
        heads = v.reshape(*grid, -1, *v.shape[1:])
        out = np.concatenate((a[:skip], np.moveaxis(heads, 0, 1).reshape(v.shape)))
        return np.moveaxis(out, 0, -1) if columns else out

    return Move(lambda a, s: order(a, s, True), lambda a, s: order(a, s, False))


_V = _tiled()
_SSM: dict[str, Key] = {
    "attention.inner_rms_epsilon": INNER_EPS,
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": Of(
        lambda c: c.integer("linear_value_head_dim") * c.integer("linear_num_value_heads"),
        lambda n, keys: {"linear_value_head_dim": n // keys["ssm.time_step_rank"]},
    ),
    "full_attention_interval": Of(
        lambda c: c.integer("full_attention_interval", default=4), lambda n, keys: {"full_attention_interval": n}
    ),
}
_EXPERTS: dict[str, Key] = {
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
}
_NEXT = {**_NORMS, "ssm_a": A_LOG, "ssm_conv1d.weight": CONV1D, "ffn_gate_inp_shexp": ROW}
_NEXT5 = {
    **_NEXT,
    "ssm_a": (A_LOG, _V),
    "ssm_conv1d.weight": (CONV1D, _tiled(first=True)),
    "attn_qkv": _tiled(first=True),
    "ssm_out": _tiled(columns=True),
    **dict.fromkeys(("attn_gate", "ssm_alpha", "ssm_beta", "ssm_dt.bias"), _V),
}


def _sections(c: Config) -> list[int]:
    """How many pairs of a head turn by each of a token's positions, which are equal for a token of text."""
    sections = c.rope.get("mrope_section") or [11, 11, 10]
    return [*sections, *[0] * (4 - len(sections))]


def _recurrent(c: Config) -> list[bool] | None:
    if c.get("layer_types", default=None) is None:
        return None
    return [not attends for attends in layers_of(c, "full_attention")] + [False] * c.n_nextn


def _layer_types(recurrent: list[bool], keys: Mapping[str, Any]) -> dict[str, object]:
    return {"layer_types": ["linear_attention" if r else "full_attention" for r in of_model(recurrent, keys)]}


_RECURRENT: dict[str, Key] = {"attention.recurrent_layers": Of(_recurrent, _layer_types)}  # layers of linear attention


def _kimi_lead(c: Config) -> int:
    n = dense_lead(c)
    return 1 if n is None else n  # the class's default


def _kda_heads(c: Config) -> int | None:
    n = c.integer("linear_attn_config.num_heads", "linear_num_heads", default=c.n_head)
    return None if n == c.n_head else n


def _kimi_heads_back(n: object, keys: Mapping[str, Any]) -> dict[str, object]:
    heads = cast("list[int]", n if isinstance(n, list) else [n] * keys["block_count"])
    return {
        "num_key_value_heads": keys["attention.head_count"],
        **_layer_types([h == 0 for h in heads], keys),
    }


_FIVE: dict[str, Key] = {
    **_SSM,
    **_RECURRENT,
    "rope.dimension_sections": Of(
        _sections, lambda n, keys: {"rope_parameters": {"mrope_section": n[:-1] if n[-1] == 0 else n}}
    ),
}
_DELTA = {
    "ssm_a": "linear_attn.A_log=",
    "ssm_dt.bias": "linear_attn.dt_bias=",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    **shared("mlp.shared_expert"),
}
_MOE = "block_sparse_moe"


def _to_column(a: Array, s: Sizes) -> Array:
    return a.reshape(_column(a.shape, s))


def _column(shape: Shape, s: Sizes) -> Shape:
    if shape != (1, 1, math.prod(shape), 1):
        raise ValueError(f"a shape of {list(shape)} instead of [1, 1, heads, 1]")
    return (math.prod(shape), 1)


_HEADS_ONLY = Move(_to_column, lambda a, s: a.reshape(1, 1, -1, 1), _column)
_KIMI = {
    **BLOCK_SPARSE,
    **shared(f"{_MOE}.shared_experts"),
    **{f"ffn_{x}": f"{_MOE}.{x}_proj" for x in ("gate", "up", "down")},
    "exp_probs_b.bias": f"{_MOE}.gate.e_score_correction_bias=",
    "ssm_a": "self_attn.A_log=",
    "ssm_dt.bias": "self_attn.dt_bias=",
    "ssm_beta": "self_attn.b_proj",
    **{f"ssm_{x}": f"self_attn.{x}_proj" for x in ("f_a", "f_b", "g_a", "g_b")},
    **{f"ssm_conv1d_{x}": f"self_attn.{x}_conv1d" for x in "qkv"},
    "ssm_norm": "self_attn.o_norm",
}
_NEXTN = mtp_layers("mtp_num_hidden_layers")


def _residual_scale(c: Config) -> float:
    """The factor of a block's normed input when the block's output is added to it. Files have one factor for all
    blocks."""
    parts = [c.number(f"{kind}_alpha_factor", default=1) for kind in ("full_attn", "linear_attn", "mlp")]
    betas = [c.number(f"{kind}_beta_factor", default=1) for kind in ("full_attn", "linear_attn", "mlp")]
    if len(set(parts)) > 1 or set(betas) != {1.0}:
        names = "full_attn_{0}_factor, linear_attn_{0}_factor and mlp_{0}_factor"
        c.fail(f"{names.format('alpha')} must be the same, {names.format('beta')} 1")
    return parts[0]


FAMILIES = (
    Family(
        arch="qwen3next",
        types=("qwen3_next",),
        cls="Qwen3NextForCausalLM",
        act="",
        keys={**_SSM, **_RECURRENT, **_EXPERTS},
        moves=_NEXT,
        merged={"linear_attn.in_proj_qkvz.weight": QKVZ},
        names=_DT_BIAS,
        nextn=_NEXTN,
        spelled=_DELTA,
    ),
    Family(
        arch="qwen35",
        types=("qwen3_5_text", "qwen3_5"),
        cls="Qwen3_5ForCausalLM",
        act="",
        keys=_FIVE,
        moves=_NEXT5,
        names=_DT_BIAS,
        nextn=_NEXTN,
        spelled=_DELTA,
    ),
    Family(
        arch="qwen35moe",
        types=("qwen3_5_moe_text", "qwen3_5_moe"),
        cls="Qwen3_5MoeForCausalLM",
        act="",
        keys={**_FIVE, **_EXPERTS},
        moves=_NEXT5,
        names=_DT_BIAS,
        nextn=_NEXTN,
        spelled=_DELTA,
    ),
    Family(
        arch="kimi-linear",
        types=("kimi_linear",),
        cls="KimiLinearForCausalLM",
        told=("num_key_value_heads", "tie_word_embeddings"),  # it is never tied
        act="",
        keys={
            "attention.head_count_kv": Of(
                lambda c: [int(a) for a in layers_of(c, "full_attention")],  # all heads read one latent row
                _kimi_heads_back,
            ),
            "context_length": ("model_max_length", "max_position_embeddings"),
            "expert_used_count": "num_experts_per_token",
            "attention.inner_rms_epsilon": INNER_EPS,
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.key_length": Of(lambda c: c.integer("kv_lora_rank") + c.integer("qk_rope_head_dim")),
            "attention.value_length": "kv_lora_rank",
            "attention.key_length_mla": NOPE_AND_ROPE,
            "attention.value_length_mla": "v_head_dim",
            "rope.dimension_count": "qk_rope_head_dim",
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "kda.head_dim": Of(
                lambda c: c.integer("linear_attn_config.head_dim", "linear_head_dim"),
                lambda n, keys: {"linear_head_dim": n, "linear_num_heads": keys["attention.head_count"]},
            ),
            # Only pyggml reads this key (models/kimi_linear.py); llama.cpp takes the number of the first layer's heads.
            "kda.head_count": Of(_kda_heads, lambda n, keys: {"linear_num_heads": n}),
            "expert_shared_count": "num_shared_experts",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_weights_norm": Of(
                lambda c: bool(c.get("moe_renormalize", default=False)), lambda norm, keys: {"moe_renormalize": norm}
            ),
            "expert_gating_func": 2,
            "expert_group_count": None,
            "expert_group_used_count": None,
            "leading_dense_block_count": Of(_kimi_lead, dense_back),
        },
        moves={"ssm_a": (A_LOG, _HEADS_ONLY)},
        spelled=_KIMI,
        merged={"self_attn.kv_b_proj.weight": KV_B},
        names={
            **_DT_BIAS,
            r"\.block_sparse_moe\.((?:gate|up|down)_proj)\.": r".mlp.\1.",
            r"^model\.layers\.(\d+)\.(?:.*\.)?e_score_correction_bias$": r"=blk.\1.exp_probs_b.bias",
        },
    ),
    Family(
        arch="minimax-01",
        types=("minimax",),
        cls="MiniMaxForCausalLM",
        told=("block_size",),
        act="",
        keys={
            **_RECURRENT,
            "residual_scale": Of(
                _residual_scale,
                lambda x, keys: (
                    {f"{kind}_alpha_factor": x for kind in ("full_attn", "linear_attn", "mlp")}
                    | {f"{kind}_beta_factor": 1 for kind in ("full_attn", "linear_attn", "mlp")}
                ),
            ),
            "attention.inner_rms_epsilon": INNER_EPS,
            "expert_feed_forward_length": "intermediate_size",
        },
        spelled={
            **BLOCK_SPARSE,
            "attn_norm_2": "self_attn.norm",
            "attn_gate": "self_attn.output_gate",
            "attn_output|attn_gate": "self_attn.out_proj",
        },
        names={
            r"^model\.layers\.(\d+)\.self_attn\.norm\.": r"=blk.\1.attn_norm_2.",
            r"^model\.layers\.(\d+)\.self_attn\.output_gate\.": r"=blk.\1.attn_gate.",
            r"^model\.layers\.(\d+)\.self_attn\.out_proj\.": r"=blk.\1.attn_output.",
            r"^model\.layers\.(\d+)\.self_attn\.qkv_proj\.": r"=blk.\1.attn_qkv.",
        },
        skip=(r"\.(slope_rate|(query|key|diagonal)_decay)$",),  # computed from the number of heads
        table="minimax-m2",
    ),
)
