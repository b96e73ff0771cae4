"""No block comes back with more error than the plain quantiser of its format, written here in NumPy, makes: the
extreme values of a (sub-)block set its scale and minimum, which a K-quant stores as integers times an f16, and each
element takes the nearest code. The bound is one for a whole block, whose sub-blocks share that f16, and for the error
as the importance matrix weighs it. Formats of fixed grids (IQ1 to IQ3) have no plain quantiser: zeros stand for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml.backends.cpu import isa_levels
from pyggml.backends.quantize import dequantize, quantize
from pyggml.dtypes import DType

from .test_blocks import BLOCKS, SEARCHED, WEIGHTED, Array

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float64)
F32_MAX = float(np.finfo(np.float32).max)
FP4_VALUES = np.array([-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12], np.float64)


def f32(x: Array) -> Array:
    """Rounded as C rounds what it computes."""
    return np.clip(x, -F32_MAX, F32_MAX).astype(np.float32).astype(np.float64)


def f16(x: Array) -> Array:
    """As stored: the nearest f16, which ends at 65504."""
    return np.clip(x, -65504, 65504).astype(np.float16).astype(np.float64)


def divided(x: Array, by: Array) -> Array:
    """x / by, 0 where `by` is."""
    return np.divide(x, by, out=np.zeros(np.broadcast_shapes(x.shape, by.shape)), where=by != 0)


def extreme(x: Array) -> Array:
    """The value of the greatest magnitude along the last axis, which is kept."""
    return np.take_along_axis(x, np.abs(x).argmax(-1, keepdims=True), -1)


def nearest(x: Array, values: Array) -> Array:
    return values[np.abs(x[..., None] - values).argmin(-1)]


def scaled(x: Array, s: Array) -> Array:
    """x / s as the formats' reference quantisers compute it, whose bytes are fixed where a code is a tie, too."""
    return f32(x * f32(divided(np.ones(1), s)))


def symmetric(x: Array, lo: int) -> Array:
    s = f32(extreme(x) / lo)
    return f16(s) * np.clip(np.floor(f32(scaled(x, s) + 0.5 - lo)) + lo, lo, -lo - 1)


def affine(x: Array, top: int) -> Array:
    lo = x.min(-1, keepdims=True)
    s = f32(f32(x.max(-1, keepdims=True) - lo) / top)
    return f16(s) * np.clip(np.floor(f32(scaled(f32(x - lo), s) + 0.5)), 0, top) + f16(lo)


def centred(x: Array, top: int) -> Array:
    s = f32(np.abs(extreme(x)) / top)
    t = scaled(x, s)
    return f16(s) * np.sign(t) * np.floor(np.abs(t) + 0.5)


def iq4_nl(x: Array) -> Array:
    s = f16(f32(extreme(x) / -127))
    return s * nearest(divided(x, s), IQ4_VALUES)


def mxfp4(x: Array) -> Array:
    with np.errstate(divide="ignore"):
        e = np.clip(np.floor(f32(np.log2(np.abs(extreme(x))))) - 2, -127, 127)
    return np.exp2(e) / 2 * nearest(x / (np.exp2(e) / 2), FP4_VALUES)


def symmetric_k(x: Array, n: int, values: Array, lo: int) -> Array:
    x = x.reshape(*x.shape[:-1], -1, n)
    s = f32(extreme(x) / values[0])
    d = f16(f32(extreme(s[..., 0])[..., None] / lo))
    s = d * np.clip(np.rint(divided(s, d)), lo, -lo - 1)
    return s * nearest(divided(x, s), values)


def affine_k(x: Array, n: int, top: int, limit: int) -> Array:
    x = x.reshape(*x.shape[:-1], -1, n)
    lo = np.minimum(x.min(-1, keepdims=True), 0)
    s, m = f32(f32(x.max(-1, keepdims=True) - lo) / top), -lo
    d, dmin = (f16(f32(v.max(-2, keepdims=True) / limit)) for v in (s, m))
    s = d * np.minimum(np.rint(divided(s, d)), limit)
    m = dmin * np.minimum(np.rint(divided(m, dmin)), limit)
    return s * np.clip(np.rint(divided(x + m, s)), 0, top) - m


PLAIN: dict[str, Callable[[Array], Array]] = {
    "Q4_0": lambda x: symmetric(x, -8),
    "Q5_0": lambda x: symmetric(x, -16),
    "Q4_1": lambda x: affine(x, 15),
    "Q5_1": lambda x: affine(x, 31),
    "Q8_0": lambda x: centred(x, 127),
    "IQ4_NL": iq4_nl,
    "Q2_K": lambda x: affine_k(x, 16, 3, 15),
    "Q4_K": lambda x: affine_k(x, 32, 15, 63),
    "Q5_K": lambda x: affine_k(x, 32, 31, 63),
    "Q3_K": lambda x: symmetric_k(x, 16, np.arange(-4.0, 4), -32),
    "Q6_K": lambda x: symmetric_k(x, 16, np.arange(-32.0, 32), -128),
    "IQ4_XS": lambda x: symmetric_k(x, 32, IQ4_VALUES, -32),
    "TQ1_0": lambda x: centred(x, 1),
    "TQ2_0": lambda x: centred(x, 1),
    "MXFP4": mxfp4,
}

N, ROWS = 256, 3
SIZES = [1e-45, 1e-40, 1e-30, 3e-8, 6e-8, 1e-6, 1e-3, 0.37, 1.0, 300.0, 7e4, 1e6, 1e9, 1e20, 1e38]


@st.composite
def rows(draw: st.DrawFn) -> Array:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    normal = rng.standard_normal((ROWS, N))
    size, sign = draw(st.sampled_from(SIZES)), draw(st.sampled_from([-1, 1]))
    kind = draw(st.sampled_from(["constant", "nearly", "one sign", "normal", "one", "outlier", "stripes", "mixed"]))
    if kind == "constant":
        x = np.ones((ROWS, N))
    elif kind == "nearly":
        x = 1 + normal * draw(st.sampled_from([1e-7, 1e-5, 1e-3, 0.1]))
    elif kind == "one sign":
        x = np.abs(normal) + draw(st.sampled_from([0, 1, 30]))
    elif kind == "normal":
        x = normal
    elif kind == "one":
        x = np.arange(N) == rng.integers(0, N, (ROWS, 1))
    elif kind == "outlier":
        x = np.where(np.arange(N) == rng.integers(0, N, (ROWS, 1)), 1, normal / draw(st.sampled_from(SIZES)))
    else:  # sub-blocks of very different sizes, each constant or not
        spread = np.exp(draw(st.sampled_from([0.1, 4])) * rng.standard_normal((ROWS, N // 16)))
        x = np.repeat(spread, 16, axis=1) * (1 + (0.01 if kind == "stripes" else 1) * normal)
    return np.clip(x * size * sign, -3e38, 3e38).astype(np.float32)


@st.composite
def importances(draw: st.DrawFn) -> Array | None:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["none", "none", "equal", "zeros", "some", "one", "spread", "huge"]))
    if kind == "some":
        return (rng.integers(0, 2, N)).astype(np.float64)
    if kind == "one":
        return (np.arange(N) == rng.integers(0, N)).astype(np.float64)
    spread = np.exp(rng.standard_normal(N) * draw(st.sampled_from([1, 10])))
    return {"none": None, "equal": np.ones(N), "zeros": np.zeros(N), "spread": spread}.get(
        kind, spread / spread.max() * 1e308
    )


def check(x: Array, weights: Array | None, dtype: DType) -> None:
    blocks = (ROWS, -1, dtype.block_size)
    want = x.astype(np.float64).reshape(blocks)
    counts = np.ones(N)
    if weights is not None and weights.any():
        counts = weights / weights.max()
        counts = np.maximum(counts / counts.mean(), 1e-6)  # the least that quantize takes a column to matter
    got = dequantize(quantize(x, dtype, weights), dtype).astype(np.float64).reshape(blocks)
    plain = PLAIN.get(dtype.name, np.zeros_like)(want).reshape(blocks)
    power, least, error = (
        np.sqrt((counts.reshape(blocks[1:]) * v**2).sum(-1)) for v in (want, plain - want, got - want)
    )
    # What is decoded, and the errors that the search compares, are rounded as f32.
    assert np.all(error <= least * (1 + 1e-5) + power * 2.0**-22), (error, least, power)


@pytest.mark.parametrize("dtype", BLOCKS, ids=lambda t: t.name)
def test_no_worse_than_plain(dtype: DType) -> None:
    @settings(max_examples=30, deadline=None)
    @given(x=rows(), weights=importances() if dtype in WEIGHTED else st.none())
    def of_any_block(x: Array, weights: Array | None) -> None:
        check(x, weights, dtype)

    of_any_block()


@pytest.mark.parametrize("isa", isa_levels())
@pytest.mark.parametrize("dtype", BLOCKS, ids=lambda t: t.name)
def test_constants(dtype: DType, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYGGML_ISA", isa)
    for c in (0.37, -0.37, -1e3):
        x = np.full((ROWS, N), c, np.float32)
        check(x, None, dtype)
        if PLAIN.get(dtype.name) is not None:
            np.testing.assert_allclose(
                dequantize(quantize(x, dtype), dtype), x, rtol=0.26 if "FP4" in dtype.name else 2e-3
            )


@pytest.mark.parametrize("dtype", [t for t in BLOCKS if t.name.startswith("IQ") and t.name not in PLAIN], ids=str)
def test_grids_take_constants(dtype: DType) -> None:
    """Every grid has a point of equal values; what is left is the rounding of the scale, and the shift of IQ1."""
    for c in (0.37, -0.37, -1e3):
        x = np.full((1, N), c, np.float32)
        np.testing.assert_allclose(dequantize(quantize(x, dtype), dtype).reshape(x.shape), x, rtol=2e-3)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", SEARCHED, ids=lambda t: t.name)
def test_tiny_rows(dtype: DType, weighted: bool) -> None:
    """Where an f16 has few scales left, or none: never worse than zeros, and better as soon as there is one that is."""
    rng = np.random.default_rng(4)
    for size in (1e-9, 1e-8, 3e-8, 6e-8, 1e-7, 3e-7, 1e-6, 1e-5):
        for shift in (0, 1, -3):
            x = ((rng.standard_normal((8, N)) + shift) * size).astype(np.float32).astype(np.float64)
            w = np.exp(rng.standard_normal(N)) if weighted else np.ones(N)
            back = dequantize(quantize(x, dtype, w if weighted else None), dtype)
            error, power = (w * (back - x) ** 2).sum(-1), (w * x**2).sum(-1)
            assert np.all(error <= power * (1 + 1e-6)), (size, shift)
            if dtype.name.endswith("_K") and size >= 1e-6:  # two steps of 2^-24 and more
                assert np.all(error < 0.3 * power), (size, shift, error / power)


@pytest.mark.parametrize("dtype", BLOCKS, ids=lambda t: t.name)
def test_same_bytes_at_every_size(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    sizes = [*SIZES, 1e12, 1e16, 1e35, 3e37]
    x = rng.standard_normal((len(sizes), N)) * np.array(sizes)[:, None]
    x[-1, ::7] /= 1e30
    x = np.clip(x, -3e38, 3e38).astype(np.float32)
    weights = np.exp(3 * rng.standard_normal(N))
    outcomes: list[bytes] = []
    for level in isa_levels():
        monkeypatch.setenv("PYGGML_ISA", level)
        outcomes.append(quantize(x, dtype).tobytes() + quantize(x, dtype, weights).tobytes())
    assert len(set(outcomes)) == 1


@pytest.mark.parametrize("dtype", WEIGHTED, ids=lambda t: t.name)
def test_tiny_blocks_no_worse_than_plain(dtype: DType) -> None:
    """Where a minimum is below what an f16 holds and the scale is not: the nearest one is 0."""
    rng = np.random.default_rng(6)
    for size in (1e-8, 2e-8, 4e-8, 1e-7, 1e-6):
        x = np.exp(4 * rng.standard_normal((ROWS, N))) * size
        check(x.astype(np.float32), np.exp(rng.standard_normal(N)), dtype)


def test_what_f16_cannot_scale() -> None:
    """A scale beyond f16 is stored as its largest number: an infinite one would make a block's zeros NaN."""
    x = np.zeros((1, N), np.float32)
    x[0, 5] = 1e30
    for dtype in BLOCKS:
        back = dequantize(quantize(x, dtype), dtype)
        assert np.isfinite(back).all(), dtype
