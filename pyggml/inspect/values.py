"""Statistics, a histogram and a thumbnail of a tensor's values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import codec
from ..codec import Array
from ..tensor import Tensor

_BINS = 32
_SIDE = 24  # pixels of a thumbnail, at most, in each direction
_CORNER = (6, 8)  # rows and columns that are shown as numbers
_LEAF_ELEMENTS = 1 << 22  # of a larger leaf only the first rows are looked at


@dataclass(frozen=True)
class Values:
    """Statistics of `n` elements: how many are NaN or infinite; the least, greatest, mean and standard deviation of the
    finite ones; and how many fall into each of 32 equal parts from `low` to `high`.

    corner  the first elements of the first rows, in NumPy order
    pixels  uint8 [rows, columns]: the first plane [ne1, ne0] from `low` (1) to `high` (255), averaged down to at most
            24 by 24; 0 for a pixel without finite values
    """

    n: int
    n_nan: int
    n_inf: int
    low: float
    high: float
    mean: float
    std: float
    histogram: tuple[int, ...]
    corner: tuple[tuple[float, ...], ...]
    pixels: Array

    def __str__(self) -> str:
        text = f"min {self.low:.4g}  max {self.high:.4g}  mean {self.mean:.4g}"
        return text if self.n_finite else "no finite value"

    @property
    def n_finite(self) -> int:
        return self.n - self.n_nan - self.n_inf


def values_of(x: Array) -> Values:
    """The statistics of an array, in NumPy order, of at least one element."""
    x = x.reshape((1, *x.shape)) if x.ndim == 1 else x
    plane = x[(0,) * (x.ndim - 2)]
    finite = np.isfinite(x)
    n_finite = int(np.count_nonzero(finite))
    n_nan = int(np.count_nonzero(np.isnan(x))) if n_finite < x.size else 0
    good = x if n_finite == x.size else x[finite]
    low, high, mean, std, bins = 0.0, 0.0, 0.0, 0.0, np.zeros(_BINS, np.int64)
    if n_finite:
        low, high = float(good.min()), float(good.max())
        mean = float(good.mean(dtype=np.float64))
        std = float(np.sqrt(max(0.0, float(np.square(good, dtype=np.float64).mean()) - mean * mean)))
        span = (low, high) if high - low > abs(high) * 1e-12 else (low - 0.5, high + 0.5)
        bins, _ = np.histogram(np.asarray(good, np.float64), _BINS, span)
    rows = tuple([tuple([float(v) for v in row]) for row in plane[: _CORNER[0], : _CORNER[1]]])
    pixels = _thumbnail(plane, low, high)
    counts = tuple([int(count) for count in bins])
    return Values(x.size, n_nan, x.size - n_finite - n_nan, low, high, mean, std, counts, rows, pixels)


def _thumbnail(plane: Array, low: float, high: float) -> Array:
    finite = np.isfinite(plane)
    total, count = np.where(finite, plane, 0).astype(np.float64), finite.astype(np.float64)
    for axis in (0, 1):
        n = plane.shape[axis]
        cuts = np.arange(min(n, _SIDE), dtype=np.intp) * n // min(n, _SIDE)
        total, count = np.add.reduceat(total, cuts, axis), np.add.reduceat(count, cuts, axis)
    mean = total / np.maximum(count, 1)
    scaled = 1 + 254 * (mean - low) / (high - low) if high > low else np.full(mean.shape, 128.0)
    return np.where(count > 0, np.clip(scaled, 1, 255), 0).astype(np.uint8)


def first_rows(t: Tensor) -> Array:
    """The values of `t`; of a large tensor, only the first rows of its first plane. Raises AllocError as
    `Tensor.numpy`."""
    t.check_readable()
    if t.n_elements <= _LEAF_ELEMENTS:
        return t.elements()[(*(0,) * (4 - t.rank), ...)]
    n = max(1, min(t.ne[1], _LEAF_ELEMENTS // t.ne[0]))
    if t.dtype.np_dtype is not None:
        return t.elements()[0, 0, :n]
    if t.dtype.block_size == 1:
        return codec.bf16_to_f32(np.ndarray((n, t.ne[0]), np.uint16, t.raw(), 0, (t.nb[1], t.nb[0])))
    return codec.decode(t.rows_of_blocks(t.raw())[0, 0, :n].reshape(-1), t.dtype, (n, t.ne[0]))
