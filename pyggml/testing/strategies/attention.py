"""Cases of flash_attn_ext and of its gradient."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

import pyggml as gg
from pyggml.tensor import Tensor

from ..harness import Case, Src, Values, gaussian, record_case
from .softmax import causal, distances, draw_sinks, hidden_rows, mild

BLOCK_TYPES = [gg.Q8_0, gg.Q4_0, gg.Q4_1, gg.Q5_0, gg.Q5_1, gg.IQ4_NL]
ROW_TYPES = [gg.F32, gg.F16, gg.F16, gg.BF16]
HEADS_INSIDE = (0, 2, 1, 3)  # stored as [d, head, position]: how a KV cache and a projection hold them


def late_keys_hidden(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Nothing after a third of the keys is visible to any token."""
    return np.where(np.arange(shape[3]) <= shape[3] // 3, np.zeros(shape), -np.inf)


def unset_after(last: int, axis: int) -> Values:
    """Keys after `last` hold NaN, as unset memory may. `axis`: that of keys in the stored NumPy shape."""

    def values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        x = mild(rng, shape)
        np.moveaxis(x, axis, 0)[last + 1 :] = np.nan
        return x

    return values


def bound(d: int, scale: float, largest_bias: float) -> float:
    """Weights are as wrong as scores: f32 sums of d products of normal values (their error grows with d), plus bias."""
    eps = 2.0**-24
    return 1e-13 + 4 * eps**2 * ((scale * d) ** 2 + largest_bias**2)


KEYS = st.one_of(st.integers(1, 70), st.integers(120, 135), st.integers(255, 260), st.sampled_from([1100, 2048]))
TOKENS = st.sampled_from([1, 1, 1, 2, 3, 5, 17, 40])


@st.composite
def flash_attn_cases(
    draw: st.DrawFn, keys: st.SearchStrategy[int] = KEYS, tokens: st.SearchStrategy[int] = TOKENS
) -> Case:
    type_k, type_v = draw(st.sampled_from(ROW_TYPES + BLOCK_TYPES)), draw(st.sampled_from(ROW_TYPES + BLOCK_TYPES))
    widths = [8, 20, 32, 40, 64, 65, 80, 128]
    d = draw(st.sampled_from([32, 64, 96] if type_k.is_quantized else widths))
    dv = draw(st.sampled_from([32, 64, 96] if type_v.is_quantized else widths))
    n_kv, n_tokens = draw(keys), draw(tokens)
    n_head_kv, group, n_batch = (
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 3, 4, 5, 8])),
        draw(st.integers(1, 2)),
    )
    cache = draw(st.sampled_from([None, HEADS_INSIDE]))
    values_kv: Values = mild
    mask = None
    max_bias = 0.0
    mask_type = draw(st.sampled_from([None, gg.F16, gg.F16, gg.F32]))
    if mask_type is not None:
        values = draw(st.sampled_from([causal, causal, distances, gaussian, hidden_rows, late_keys_hidden]))
        if values is late_keys_hidden and not type_k.is_quantized and not type_v.is_quantized:
            values_kv = unset_after(n_kv // 3, 2 if cache is None else 1)
        m2, m3 = draw(st.sampled_from([1, 1, n_head_kv])), draw(st.sampled_from([1, n_batch]))
        mask = Src(mask_type, (n_kv, n_tokens + draw(st.sampled_from([0, 3])), m2, m3), None, 0, values)
        max_bias = draw(st.sampled_from([0.0, 0.0, 8.0]))
    q = Src(gg.F32, (d, n_tokens, n_head_kv * group, n_batch), draw(st.sampled_from([None, HEADS_INSIDE])), 0, mild)
    k = Src(type_k, (d, n_kv, n_head_kv, n_batch), cache, 0, values_kv)
    v = Src(type_v, (dv, n_kv, n_head_kv, n_batch), cache, 0, values_kv)
    scale = draw(st.sampled_from([d**-0.5, 0.125, -0.3]))
    cap = draw(st.sampled_from([0.0, 0.0, 30.0, 2.5]))

    sinks = draw_sinks(draw, q.ne[2])

    def build(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        return gg.flash_attn_ext(q, k, v, mask, scale, max_bias, cap, sinks)

    largest_bias = 80 if mask is not None and mask.values is gaussian else 0
    seed = draw(st.integers(0, 99))
    return Case((q, k, v, mask, sinks), build, bound(d, scale, largest_bias), seed)


def back_case(case: Case) -> Case:
    """A case of flash_attn_ext_back, of the sources of a case of flash_attn_ext."""
    node = record_case(case)

    def build(*t: Tensor | None) -> Tensor:
        return gg.flash_attn_ext_back(*t, **node.op_params)  # pyright: ignore[reportArgumentType]

    result = Src(gg.F32, node.ne, None, 0, mild)
    return replace(case, srcs=(*case.srcs, result, result), build=build, nmse=10 * case.nmse)


SMALL = {"flash_attn_ext": flash_attn_cases(st.integers(1, 12), st.sampled_from([1, 2, 5]))}  # for central differences
STRATEGIES = {"flash_attn_ext": flash_attn_cases(), "flash_attn_ext_back": flash_attn_cases().map(back_case)}
