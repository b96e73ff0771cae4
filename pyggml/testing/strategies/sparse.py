"""Cases of lightning_indexer and top_k_mask."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

import pyggml as gg

from ..harness import Case, Src, Values
from .attention import BLOCK_TYPES, HEADS_INSIDE, ROW_TYPES
from .matmul import bound, signed_along
from .reduce import ties
from .softmax import causal, hidden_rows, mild

LENGTHS = st.one_of(st.integers(1, 70), st.integers(255, 260))
TRANSPOSED = (0, 2, 1, 3)


def of_one_sign(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Rows whose products with each other do not cancel: all products of elements have one sign."""
    return signed_along(3)(rng, shape) * rng.choice([-1.0, 1.0], (*shape[:3], 1))


def weights(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Of one sign for all heads of a token: nor do sums of heads cancel."""
    return np.abs(mild(rng, shape)) * rng.choice([-1.0, 1.0], (*shape[:3], 1))


@st.composite
def indexer_cases(draw: st.DrawFn) -> Case:
    """The op sums d products, then heads, in f32."""
    type_k = draw(st.sampled_from(ROW_TYPES + BLOCK_TYPES))
    d = draw(st.sampled_from([32, 64, 128] if type_k.is_quantized else [1, 8, 20, 65, 128]))
    n_head, n_tokens, n_kv = (
        draw(st.sampled_from([1, 2, 3, 4, 7, 8, 64])),
        draw(st.sampled_from([1, 2, 5])),
        draw(LENGTHS),
    )
    q = Src(gg.F32, (d, n_head, n_tokens), draw(st.sampled_from([None, HEADS_INSIDE])), 0, of_one_sign)
    k = Src(type_k, (d, n_kv), None, draw(st.sampled_from([0, 0, 32])), of_one_sign)
    w = draw(st.sampled_from([None, Src(gg.F32, (n_head, n_tokens), None, 0, weights)]))
    return Case((q, k, w), gg.lightning_indexer, bound(d + n_head), draw(st.integers(0, 99)))


def numbers(least: int, end: int) -> Values:
    """Whole numbers from `least` to below `end`."""
    return lambda rng, shape: rng.integers(least, end, shape)


@st.composite
def choice_cases(draw: st.DrawFn) -> Case:
    n, n_tokens, m2 = draw(LENGTHS), draw(st.integers(1, 5)), draw(st.integers(1, 2))
    ne = (n, n_tokens, m2 * draw(st.integers(1, 3)), draw(st.integers(1, 2)))
    a = Src(gg.F32, ne, draw(st.sampled_from([None, TRANSPOSED])), 0, draw(st.sampled_from([mild, ties])))
    rows = n_tokens + draw(st.sampled_from([0, 3]))
    mask_values = draw(st.sampled_from([causal, causal, hidden_rows, mild]))
    mask = Src(draw(st.sampled_from([gg.F32, gg.F16])), (n, rows, m2), None, draw(st.sampled_from([0, 3])), mask_values)
    blocks = own = None
    if draw(st.booleans()):
        blocks = Src(gg.I32, (n,), None, 0, numbers(0, draw(st.integers(1, n))))
        if draw(st.booleans()):
            own = Src(gg.I32, (draw(st.integers(1, 2)), n_tokens), None, 0, numbers(-1, n))
    k = draw(st.one_of(st.integers(0, n), st.just(2 * n)))
    return Case(
        (a, mask, blocks, own),
        lambda a, mask, blocks, own: gg.top_k_mask(a, mask, k, blocks, own),
        0.0,
        draw(st.integers(0, 99)),
    )


STRATEGIES = {"lightning_indexer": indexer_cases(), "top_k_mask": choice_cases()}
