"""Rows unlike gaussian noise, for which candidates chosen on noise are not enough: an outlier in each super-block, few
values among zeros, heavy tails, slopes, values all near one. The bounds are what a search of about ten times as many
candidates leaves (24 ends, 28 ranges with three rounds of least squares, all integers next to each other)."""

from __future__ import annotations

import numpy as np
import pytest

from pyggml.backends.quantize import dequantize, quantize
from pyggml.dtypes import DType

from .test_blocks import Array

KINDS = ("outlier", "sparse", "sparser", "heavy", "ramp", "shifted")
# For each kind the error left, without and with an importance matrix, of the sum of squares.
LEFT: dict[str, tuple[tuple[float, float], ...]] = {
    "Q4_0": (
        (3.63e-05, 6.52e-05),
        (0.00254, 0.00131),
        (0.000385, 5.91e-05),
        (0.0137, 0.0124),
        (0.00158, 0.000613),
        (0.00184, 0.00132),
    ),
    "Q4_1": (
        (0.000182, 6.19e-05),
        (0.0118, 0.00099),
        (0.00399, 7e-05),
        (0.0117, 0.0065),
        (3.98e-06, 2.65e-06),
        (5.95e-05, 3.94e-05),
    ),
    "Q5_0": (
        (3.44e-05, 6.25e-05),
        (0.000599, 0.000223),
        (9.16e-05, 7.99e-06),
        (0.00492, 0.00475),
        (0.000336, 0.000275),
        (0.000454, 0.000347),
    ),
    "Q5_1": (
        (0.000177, 6.01e-05),
        (0.00293, 0.000208),
        (0.000667, 1.92e-05),
        (0.00309, 0.00183),
        (4.84e-08, 4.83e-08),
        (1.41e-05, 9.44e-06),
    ),
    "Q2_K": (
        (0.000332, 0.000521),
        (0.0187, 0.0146),
        (0.00206, 0.00146),
        (0.0511, 0.0435),
        (0.000429, 0.000395),
        (0.00774, 0.00706),
    ),
    "Q3_K": (
        (0.000226, 0.000357),
        (0.00387, 0.00322),
        (0.000615, 0.000679),
        (0.0223, 0.021),
        (0.000239, 0.000329),
        (0.00493, 0.00433),
    ),
    "Q4_K": (
        (5.79e-05, 9.69e-05),
        (0.00137, 0.00115),
        (0.000134, 9.28e-05),
        (0.00727, 0.00669),
        (0.000179, 0.000165),
        (0.000426, 0.000378),
    ),
    "Q5_K": (
        (4.05e-05, 6.99e-05),
        (0.000358, 0.000303),
        (3.6e-05, 2.9e-05),
        (0.00203, 0.00193),
        (4.46e-05, 4.11e-05),
        (0.0001, 8.78e-05),
    ),
    "Q6_K": (
        (1.69e-05, 3.47e-05),
        (3.24e-05, 2.64e-05),
        (4.04e-06, 2.64e-06),
        (0.00077, 0.000836),
        (7.56e-05, 6.54e-05),
        (8.5e-05, 7.09e-05),
    ),
    "IQ4_NL": (
        (0.00196, 0.00365),
        (0.00256, 0.0022),
        (0.00199, 0.00202),
        (0.00909, 0.00857),
        (0.000758, 0.000709),
        (0.00283, 0.00254),
    ),
    "IQ4_XS": (
        (0.00205, 0.00379),
        (0.00272, 0.00234),
        (0.00205, 0.00208),
        (0.00931, 0.00883),
        (0.00077, 0.000738),
        (0.00286, 0.00258),
    ),
}
MARGIN = 1.05


def unlike_noise(kind: str) -> Array:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((32, 1024))
    if kind == "outlier":
        x[:, ::256] *= 1000
    elif kind in ("sparse", "sparser"):
        x[rng.random(x.shape) < (0.9 if kind == "sparse" else 0.99)] = 0
    elif kind == "heavy":
        x = rng.standard_t(2, size=x.shape)
    elif kind == "ramp":
        x = np.linspace(-1, 1, 1024) * np.exp(x[:, :1])
    else:
        x = 1 + 0.1 * x
    return x.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [DType[name] for name in LEFT], ids=str)
def test_as_good_as_many_candidates(dtype: DType, kind: str) -> None:
    x = unlike_noise(kind)
    importance = np.random.default_rng(1).exponential(size=x.shape[1])
    for weights, most in zip((None, importance), LEFT[dtype.name][KINDS.index(kind)], strict=True):
        back = dequantize(quantize(x.astype(np.float32), dtype, weights), dtype)
        w = np.ones(x.shape[1]) if weights is None else weights
        left = (w * (back - x) ** 2).sum() / (w * x**2).sum()
        assert left <= MARGIN * most, (left, most)


def test_small_values_beside_an_outlier_are_kept() -> None:
    """Their scale is less than half of the d that makes the outlier's integer the last one: it is 1 then, not 0."""
    x = unlike_noise("outlier")
    small = np.arange(x.shape[1]) % 256 >= 16
    back = dequantize(quantize(x.astype(np.float32), DType.Q6_K), DType.Q6_K)
    assert ((back - x)[:, small] ** 2).sum() < 0.1 * (x[:, small] ** 2).sum()
