"""Cases of lightning_indexer and top_k_mask."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false

from __future__ import annotations

from hypothesis import strategies as st

import pyggml as gg

from ..harness import Case, Src, Values
from .attention import BLOCK_TYPES, HEADS_INSIDE, ROW_TYPES
from .reduce import ties
from .softmax import causal, hidden_rows, mild

LENGTHS = st.one_of(st.integers(1, 70), st.integers(255, 260))
TRANSPOSED = (0, 2, 1, 3)


@st.composite
def indexer_cases(draw: st.DrawFn) -> Case:
    """The op sums d products, then heads, in f32. The error is relative to the summed values. These are as large as the
    result when all weights have one sign, and n_head times as large at most."""
    type_k = draw(st.sampled_from(ROW_TYPES + BLOCK_TYPES))
    d = draw(st.sampled_from([32, 64, 128] if type_k.is_quantized else [1, 8, 20, 65, 128]))
    n_head, n_tokens, n_kv = (
        draw(st.sampled_from([1, 2, 3, 4, 7, 8, 64])),
        draw(st.sampled_from([1, 2, 5])),
        draw(LENGTHS),
    )
    q = Src(gg.F32, (d, n_head, n_tokens), draw(st.sampled_from([None, HEADS_INSIDE])), 0, mild)
    k = Src(type_k, (d, n_kv), None, draw(st.sampled_from([0, 0, 32])), mild)
    w = draw(st.sampled_from([None, Src(gg.F32, (n_head, n_tokens), None, 0, mild)]))
    return Case((q, k, w), gg.lightning_indexer, n_head * d * 2.0**-46, draw(st.integers(0, 99)))


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
