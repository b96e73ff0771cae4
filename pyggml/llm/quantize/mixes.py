"""Which type each tensor of a quantised model gets: llama.cpp's mixes (src/llama-quant.cpp, as of 2026) as a table.

A mix has a base type and rows (part of the model, condition, type); the first row that holds for a tensor decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyggml.dtypes import DType
from pyggml.errors import DTypeError
from pyggml.models.hparams import HParams

D = DType


@dataclass(frozen=True)
class Facts:
    """What the conditions of a mix depend on: the layer of a tensor, and properties of the model."""

    il: int
    n_layer: int
    n_gqa: int  # query heads that share a KV head
    n_expert: int
    has_imatrix: bool
    is_70b: bool  # 80 layers with grouped queries


Condition = Callable[[Facts], bool]
Row = tuple[str, Condition, DType]


def always(f: Facts) -> bool:
    """Every tensor of its kind."""
    return True


def more_bits(f: Facts) -> bool:
    """The first and the last eighth of the layers, and every third between."""
    eighth = f.n_layer // 8
    return f.il < eighth or f.il >= 7 * f.n_layer // 8 or (f.il - eighth) % 3 == 2


def middle(f: Facts) -> bool:
    """Neither the first nor the last eighth of the layers."""
    return f.n_layer // 8 <= f.il < 7 * f.n_layer // 8


def first_eighth(f: Facts) -> bool:
    """The first eighth of the layers."""
    return f.il < f.n_layer // 8


def gqa4(f: Facts) -> bool:
    """Whether at least four query heads share a KV head, so that K and V are small."""
    return f.n_gqa >= 4


def moe8(f: Facts) -> bool:
    """Whether the model has eight experts (Mixtral), so that attention is a small part of it."""
    return f.n_expert == 8


def with_imatrix(f: Facts) -> bool:
    """An importance matrix is given."""
    return f.has_imatrix


def no(condition: Condition) -> Condition:
    """The opposite."""
    return lambda f: not condition(f)


def both(a: Condition, b: Condition) -> Condition:
    """Both hold."""
    return lambda f: a(f) and b(f)


def either(a: Condition, b: Condition) -> Condition:
    """At least one holds."""
    return lambda f: a(f) or b(f)


def before(n: int) -> Condition:
    """The first `n` layers."""
    return lambda f: f.il < n


@dataclass(frozen=True)
class Mix:
    """A file type: its id in `general.file_type`, the base type, the rows, and how `output.weight` is stored."""

    file_type: int
    base: DType
    rows: tuple[Row, ...] = ()
    output: DType = D.Q6_K
    bump_v: bool = True  # more bits for attn_v in 70B and Mixtral models, and for attn_k in Mixtral models


def _few_bits(file_type: int, base: DType, better: DType, attn_output: DType | None = None) -> Mix:
    """A mix of 1 or 2 bits, with the type `better` for the embedding, V and the first layers."""
    rows: list[Row] = [
        ("token_embd", always, better if better is D.IQ3_S else D.Q2_K),
        ("attn_v", either(gqa4, lambda f: f.n_expert >= 4), D.Q4_K),
        ("attn_v", always, better),
        ("attn_k", moe8, D.Q4_K),
        ("ffn_down", first_eighth, better),
        ("attn_output", moe8, D.Q5_K),
    ]
    if attn_output is not None:
        rows.append(("attn_output", always, attn_output))
    return Mix(file_type, base, tuple(rows), D.Q5_K, bump_v=False)


_MOE_OUT: Row = ("attn_output", moe8, D.Q5_K)
_IQ4: tuple[Row, ...] = (
    ("attn_v", gqa4, D.Q5_K),
    ("ffn_down", both(first_eighth, no(with_imatrix)), D.Q5_K),
    _MOE_OUT,
)
_TERNARY: tuple[Row, ...] = (("token_embd", always, D.Q4_K),)

MIXES: Mapping[str, Mix] = {
    "F32": Mix(0, D.F32),
    "F16": Mix(1, D.F16),
    "BF16": Mix(32, D.BF16),
    "Q4_0": Mix(2, D.Q4_0, (("ffn_down", both(first_eighth, with_imatrix), D.Q4_1),)),
    "Q4_1": Mix(3, D.Q4_1),
    "Q5_0": Mix(8, D.Q5_0, (("ffn_down", both(first_eighth, with_imatrix), D.Q5_1),)),
    "Q5_1": Mix(9, D.Q5_1),
    "Q8_0": Mix(7, D.Q8_0, output=D.Q8_0),
    "Q2_K": Mix(
        10,
        D.Q2_K,
        (
            ("attn_v", gqa4, D.Q4_K),
            ("attn_v", always, D.Q3_K),
            ("ffn_down", always, D.Q3_K),
            _MOE_OUT,
            ("attn_output", always, D.Q3_K),
        ),
    ),
    "Q2_K_S": Mix(21, D.Q2_K, (("attn_v", gqa4, D.Q4_K), ("ffn_down", first_eighth, D.Q4_K))),
    "Q3_K_S": Mix(11, D.Q3_K, (_MOE_OUT,)),
    "Q3_K_M": Mix(
        12,
        D.Q3_K,
        (
            ("attn_v", before(2), D.Q5_K),
            ("attn_v", always, D.Q4_K),
            ("ffn_down", lambda f: f.il < f.n_layer // 16, D.Q5_K),
            ("ffn_down", always, D.Q4_K),
            _MOE_OUT,
            ("attn_output", always, D.Q4_K),
        ),
    ),
    "Q3_K_L": Mix(
        13,
        D.Q3_K,
        (
            ("attn_v", always, D.Q5_K),
            ("ffn_down", always, D.Q5_K),
            ("attn_output", no(moe8), D.Q5_K),
        ),
    ),
    "Q4_K_S": Mix(14, D.Q4_K, (("attn_v", before(4), D.Q5_K), ("ffn_down", first_eighth, D.Q5_K), _MOE_OUT)),
    "Q4_K_M": Mix(
        15,
        D.Q4_K,
        (("attn_v", more_bits, D.Q6_K), ("ffn_down", more_bits, D.Q6_K), _MOE_OUT),
    ),
    "Q5_K_S": Mix(16, D.Q5_K),
    "Q5_K_M": Mix(17, D.Q5_K, (("attn_v", more_bits, D.Q6_K), ("ffn_down", more_bits, D.Q6_K))),
    "Q6_K": Mix(18, D.Q6_K),
    "IQ1_S": _few_bits(24, D.IQ1_S, D.Q2_K, D.IQ2_XXS),
    "IQ1_M": _few_bits(31, D.IQ1_M, D.Q2_K, D.IQ2_XXS),
    "IQ2_XXS": _few_bits(19, D.IQ2_XXS, D.Q2_K),
    "IQ2_XS": _few_bits(20, D.IQ2_XS, D.Q2_K),
    "IQ2_S": _few_bits(28, D.IQ2_XS, D.IQ3_S, D.IQ3_S),
    "IQ2_M": _few_bits(29, D.IQ2_S, D.IQ3_S, D.IQ3_S),
    "IQ3_XXS": Mix(
        23,
        D.IQ3_XXS,
        (
            ("token_embd", always, D.IQ3_S),
            ("attn_v", gqa4, D.Q4_K),
            ("attn_v", no(with_imatrix), D.IQ3_S),
            ("attn_k", always, D.IQ2_S),
            ("attn_q", always, D.IQ2_S),
            ("ffn_down", both(first_eighth, no(with_imatrix)), D.Q4_K),
            ("ffn_down", no(with_imatrix), D.Q3_K),
            _MOE_OUT,
            ("attn_output", always, D.IQ3_S),
        ),
        D.Q5_K,
    ),
    "IQ3_XS": Mix(
        22,
        D.IQ3_S,
        (
            ("attn_v", gqa4, D.Q4_K),
            ("attn_k", always, D.IQ3_XXS),
            ("attn_q", always, D.IQ3_XXS),
            ("ffn_gate", middle, D.IQ3_XXS),
            ("ffn_up", middle, D.IQ3_XXS),
            _MOE_OUT,
        ),
    ),
    "IQ3_S": Mix(26, D.IQ3_S, (("attn_v", gqa4, D.Q4_K), _MOE_OUT)),
    "IQ3_M": Mix(
        27,
        D.IQ3_S,
        (
            ("attn_v", always, D.Q4_K),
            ("ffn_down", either(first_eighth, both(moe8, more_bits)), D.Q4_K),
            _MOE_OUT,
            ("attn_output", always, D.Q4_K),
        ),
    ),
    "IQ4_NL": Mix(25, D.IQ4_NL, _IQ4),
    "IQ4_XS": Mix(30, D.IQ4_XS, _IQ4),
    "TQ1_0": Mix(36, D.TQ1_0, _TERNARY),
    "TQ2_0": Mix(37, D.TQ2_0, _TERNARY),
    "MXFP4_MOE": Mix(38, D.MXFP4, (), D.Q8_0, bump_v=False),
}
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

# The type instead, when a tensor's rows are not a multiple of 256 elements; F16 when nothing else fits.
_FALLBACK: Mapping[DType, DType] = {
    **dict.fromkeys((D.IQ1_S, D.IQ1_M, D.IQ2_XXS, D.IQ2_XS, D.IQ2_S, D.IQ3_XXS, D.IQ3_S, D.IQ4_XS), D.IQ4_NL),
    **dict.fromkeys((D.Q2_K, D.Q3_K, D.TQ1_0, D.TQ2_0), D.Q4_0),
    D.Q4_K: D.Q5_0,
    D.Q5_K: D.Q5_1,
    D.Q6_K: D.Q8_0,
}
_ATTENTION = {  # tensor -> the part that it counts as; a fused tensor needs as many bits as V
    "attn_qkv": "attn_v",
    "attn_kv_b": "attn_v",
    **{name: name for name in ("attn_q", "attn_k", "attn_v", "attn_output")},
    **{f"cross_{name}": name for name in ("attn_q", "attn_k", "attn_v")},
}
_FFN = ("ffn_down", "ffn_gate", "ffn_up")  # also as the beginning of the names of experts' tensors
_SMALL = (  # parts of layers that are small or not matrices
    *("ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "shortconv.conv", "ple_conv1d"),
    *("ple_norm_key", "ple_norm_query", "ple_norm_conv", "ffn_gate_tid2eid"),
    *("attn_compressor_ape", "indexer_compressor_ape"),
    *("time_mix_first", "time_mix_decay_w1", "time_mix_decay_w2", "time_mix_lerp_fused"),
    *("altup_correct_coef", "altup_predict_coef", "altup_router", "laurel_l", "laurel_r"),
    *(f"time_mix_{x}" for x in ("w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2")),
)
_TABLES = ("token_embd.weight", "per_layer_token_embd.weight")
_LEFT = (
    *("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight", "attn_rel_b.weight"),
    *("per_layer_model_proj.weight", "altup_proj.weight", "altup_unembd_proj.weight"),
    *(f".{name}.weight" for name in _SMALL),
)
_LAYER = re.compile(r"blk\.(\d+)\.")


def find_mix(name: str) -> tuple[str, Mix]:
    """The mix with that name (in any case; Q4_K means Q4_K_M). Raises DTypeError, which lists the names."""
    upper = name.upper()
    upper = _ALIASES.get(upper, upper)
    if upper not in MIXES:
        raise DTypeError(f"unknown quantisation type {name!r}: known are {', '.join(MIXES)}")
    return upper, MIXES[upper]


def file_type_name(file_type: object) -> str | None:
    """The name for a value of `general.file_type`; None for a value that is not in the table."""
    return next((name for name, mix in MIXES.items() if mix.file_type == file_type), None)


def is_quantizable(name: str, ne: tuple[int, ...]) -> bool:
    """Whether a tensor is quantised: matrices (and stacks of them) are, except norms, expert routers, the embeddings of
    positions, distances and token types, and small parts of layers."""
    return name.endswith("weight") and ne[1] * ne[2] * ne[3] > 1 and not name.endswith(_LEFT)


@dataclass(frozen=True)
class Choice:
    """The options of llama-quantize that assign types besides the mix. `types`: pairs of a pattern and a type; the
    first pattern found in a tensor's name decides."""

    mix: Mix
    has_imatrix: bool = False
    pure: bool = False
    output_tensor_type: DType | None = None
    token_embedding_type: DType | None = None
    types: tuple[tuple[re.Pattern[str], DType], ...] = ()


def tensor_type(choice: Choice, hp: HParams | None, has_output: bool, name: str, ne: tuple[int, ...]) -> DType:
    """The type that a quantizable tensor gets: a type with smaller blocks, or F16, when its rows are not whole
    blocks. Without `hp`, it is the base type of the mix."""
    mix = choice.mix
    if name in _TABLES and choice.token_embedding_type is not None:
        return _fitting(ne[0], choice.token_embedding_type)
    if name == "output.weight" and choice.output_tensor_type is not None:
        return _fitting(ne[0], choice.output_tensor_type)
    asked = next((dtype for pattern, dtype in choice.types if pattern.search(name)), None)
    if asked is not None:
        return _fitting(ne[0], asked)
    if choice.pure or hp is None or not mix.base.is_quantized:
        return _fitting(ne[0], mix.base)
    if name == "output.weight" or (name in _TABLES and not has_output):  # tied: the embedding is the output
        fits = ne[0] % mix.base.block_size == 0
        return _fitting(ne[0], choice.output_tensor_type or (mix.output if fits else D.Q8_0))
    if mix.base is D.MXFP4:
        return _fitting(ne[0], D.MXFP4 if ne[2] > 1 else D.Q8_0)
    return _fitting(ne[0], _from_rows(mix, _facts(choice, hp, name, ne), _part(name)))


def _part(name: str) -> str:
    if name in _TABLES:
        return "token_embd"
    role = name.removesuffix(".weight").rpartition(".")[2]
    return _ATTENTION.get(role) or next((part for part in _FFN if role.startswith(part)), "")


def _facts(choice: Choice, hp: HParams, name: str, ne: tuple[int, ...]) -> Facts:
    found = _LAYER.search(name)
    attends = next((hp.layer(il) for il in range(hp.n_layer) if hp.has_kv(il)), None)
    n_gqa = attends.n_head // attends.n_head_kv if attends else 1
    return Facts(
        il=int(found[1]) if found else 0,
        n_layer=hp.n_layer,
        n_gqa=n_gqa,
        n_expert=hp.n_expert,
        has_imatrix=choice.has_imatrix,
        is_70b=hp.n_layer == 80 and n_gqa > 1,
    )


def _from_rows(mix: Mix, facts: Facts, part: str) -> DType:
    chosen = next((dtype for row_part, holds, dtype in mix.rows if row_part == part and holds(facts)), mix.base)
    if not mix.bump_v:
        return chosen
    if part in ("attn_v", "attn_k") and moe8(facts):
        return D.Q8_0
    if part == "attn_v" and facts.is_70b and chosen in (D.Q3_K, D.Q4_K):
        return D.Q5_K
    return chosen


def _fitting(n: int, dtype: DType) -> DType:
    """`dtype`, or the type instead when rows of `n` elements are not whole blocks of `dtype`."""
    if n % dtype.block_size == 0:
        return dtype
    substitute = _FALLBACK.get(dtype, D.F16)
    return substitute if n % substitute.block_size == 0 else D.F16
