"""The usual end of a sampler chain in C against its steps written out in NumPy, which it equals to the last bit."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml.native.sampling import TopDraw

SHAPES = ("random", "ties", "rising", "falling", "equal", "signed zeros", "mostly -inf")


def row_of(shape: str, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n) * rng.choice([0.01, 1, 5, 60])
    if shape == "ties":
        x = np.round(x)
    elif shape in ("rising", "falling"):
        x = np.sort(x)[:: 1 if shape == "rising" else -1]
    elif shape == "equal":
        x[:] = x[0]
    elif shape == "signed zeros":
        x = np.where(x > 0, 0.0, -0.0)
    elif shape == "mostly -inf":
        x[rng.random(n) < 0.9] = -np.inf
        x[rng.integers(n)] = 1.5
    return x.astype(np.float32)


def expected(x: np.ndarray, k: int, top_p: float, min_p: float, temp: float, u: float) -> int:
    ids = np.argsort(-x, kind="stable")[:k]
    best = x[ids]
    weights = np.exp(best - best[0])
    n = k
    if top_p < 1:
        sums = np.add.accumulate(weights)
        n = min(k, int((sums < np.float32(top_p * float(sums[-1]))).sum()) + 1)
    n = int((weights[:n] >= np.float32(min_p)).sum())
    by_temp = best[:n] / np.float32(temp)
    sums = np.add.accumulate(np.exp(by_temp - by_temp[0]))
    above = np.flatnonzero(sums > np.float32(u * float(sums[-1])))
    return int(ids[above[0] if len(above) else np.flatnonzero(sums == sums[-1])[0]])


@given(
    st.sampled_from(SHAPES),
    st.sampled_from((2, 15, 16, 17, 64, 100, 259, 512, 2049, 5000)) | st.integers(2, 700),
    st.integers(0, 10**6),
    st.integers(1, 300),
    st.sampled_from((0.0, 0.5, 0.95, 1.0)) | st.floats(0, 1),
    st.sampled_from((0.0, 0.05, 1.0)) | st.floats(0, 1),
    st.sampled_from((1.0, 0.8, 0.05, 30.0)) | st.floats(0.01, 100),
    st.sampled_from((0.0, 0.5, 1 - 2.0**-53)) | st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=400, deadline=None)
def test_top_draw(shape: str, n: int, seed: int, k: int, top_p: float, min_p: float, temp: float, u: float) -> None:
    k = min(k, n - 1)
    x = row_of(shape, n, seed)
    before = x.copy()
    rng = mock.Mock(random=lambda: u)
    draw = TopDraw(k, top_p, min_p, temp)
    for _ in range(2):  # what the last call left behind does no harm
        assert draw.draw(x, rng) == expected(x, k, top_p, min_p, temp, u)
    assert (x == before).all()


def test_long_rows() -> None:
    rng = np.random.default_rng(0)
    for x in (rng.standard_normal(128256) * 3, np.arange(128256) / 100, np.zeros(128256)):
        x = x.astype(np.float32)
        for k in (1, 40, 4096):
            draw, u = TopDraw(k, 0.95, 0.0, 1.5), rng.random()
            assert draw.draw(x, mock.Mock(random=lambda u=u: u)) == expected(x, k, 0.95, 0.0, 1.5, u)


@pytest.mark.parametrize("n", [20, 500, 5000])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_left_to_the_samplers(n: int, value: float) -> None:
    """NaN wherever it is, infinity, and rows it cannot read: no result, no random number taken, no warning."""
    rng = mock.Mock()
    draw = TopDraw(10, 0.95, 0.05, 0.8)
    x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    for row in [np.full(n, value, np.float32), x[:10], x.astype(np.float64), np.repeat(x, 2)[::2]]:
        assert draw.draw(row, rng) is None
    if value != -np.inf:
        for at in (0, 9, 10, n // 2, n - 1):
            bad = x.copy()
            bad[at] = value
            assert draw.draw(bad, rng) is None
    for temp in (1e-45, 1e300):
        assert TopDraw(10, 0.95, 0.05, temp).draw(x, rng) is None
    rng.random.assert_not_called()
