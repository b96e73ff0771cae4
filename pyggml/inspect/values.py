"""Statistics, a histogram and a thumbnail of a tensor's values."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from .. import codec
from ..codec import Array
from ..tensor import Tensor

_BINS = 32
_SIDE = 24  # pixels of a thumbnail, at most, in each direction
_PLANES, _PLANE_SIDE = 32, 32  # of a tensor's planes so many are kept, with so many pixels in each direction
_CORNER = (6, 8)  # rows and columns that are shown as numbers
_LEAF_ELEMENTS = 1 << 22  # of a larger leaf only the first rows are looked at


@dataclass(frozen=True)
class Planes:
    """The first 32 planes [ne1, ne0] of a tensor, without padding: rows and columns at the end which hold only zeros,
    infinities and NaN in all planes.

    rows, columns  without padding
    n              how many planes the tensor has
    corners        for each plane the first elements of its first rows
    pixels         uint8 [planes, rows, columns]: each plane from the tensor's `low` (1) to `high` (255), averaged down
                   to at most 32 by 32; 0 for a pixel without finite values
    """

    rows: int
    columns: int
    n: int
    corners: tuple[tuple[tuple[float, ...], ...], ...]
    pixels: Array


@dataclass(frozen=True)
class Values:
    """Statistics of `n` elements: how many are NaN or infinite; the least, greatest, mean and standard deviation of the
    finite ones; and how many fall into each of 32 equal parts from `low` to `high`.

    corner  the first elements of the first rows, in NumPy order
    pixels  uint8 [rows, columns]: the first plane [ne1, ne0] from `low` (1) to `high` (255), averaged down to at most
            24 by 24; 0 for a pixel without finite values
    planes  more planes, when they were asked for
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
    planes: Planes | None = None

    def __str__(self) -> str:
        text = f"min {self.low:.4g}  max {self.high:.4g}  mean {self.mean:.4g}"
        return text if self.n_finite else "no finite value"

    @property
    def n_finite(self) -> int:
        return self.n - self.n_nan - self.n_inf


def values_of(x: Array, planes: bool = False) -> Values:
    """The statistics of an array, in NumPy order, of at least one element; with its `planes` if so asked."""
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
        around = 0.0 if high - low > abs(high) * 1e-12 else max(0.5, abs(high) * 1e-6)
        span = (low - around, high + around)
        bins, _ = np.histogram(np.asarray(good, np.float64), _BINS, span)
    pixels = _thumbnail(plane, low, high, _SIDE)
    counts = tuple([int(count) for count in bins])
    more = _planes(x, low, high) if planes else None
    return Values(x.size, n_nan, x.size - n_finite - n_nan, low, high, mean, std, counts, _corner(plane), pixels, more)


def _corner(plane: Array) -> tuple[tuple[float, ...], ...]:
    return tuple([tuple(row) for row in plane[: _CORNER[0], : _CORNER[1]].astype(np.float64).tolist()])


def _planes(x: Array, low: float, high: float) -> Planes:
    stack = x.reshape(-1, *x.shape[-2:])
    told = (np.isfinite(stack) & (stack != 0)).any(axis=0)
    rows, columns = np.argwhere(told).max(axis=0) + 1 if told.any() else told.shape
    shown = stack[:_PLANES, :rows, :columns]
    corners = tuple([_corner(plane) for plane in shown])
    return Planes(int(rows), int(columns), len(stack), corners, _thumbnail(shown, low, high, _PLANE_SIDE))


def _thumbnail(planes: Array, low: float, high: float, side: int) -> Array:
    """Planes [.., rows, columns] averaged down to `side` pixels, see `Values`."""
    finite = np.isfinite(planes)
    total, count = np.where(finite, planes, 0).astype(np.float64), finite.astype(np.float64)
    for axis in (-2, -1):
        n = planes.shape[axis]
        cuts = np.arange(min(n, side), dtype=np.intp) * n // min(n, side)
        total, count = np.add.reduceat(total, cuts, axis), np.add.reduceat(count, cuts, axis)
    mean = total / np.maximum(count, 1)
    scaled = 1 + 254 * (mean - low) / (high - low) if high > low else np.full(mean.shape, 128.0)
    return np.where(count > 0, np.clip(scaled, 1, 255), 0).astype(np.uint8)


def first_rows(t: Tensor) -> Array:
    """The values of `t`; of a large tensor, only the first rows of its first plane. Raises AllocError as
    `Tensor.numpy`."""
    t.check_readable()
    ne, nb = t.layout
    if prod(ne) <= _LEAF_ELEMENTS:
        return t.elements()[(*(0,) * (4 - t.rank), ...)]
    n = max(1, min(ne[1], _LEAF_ELEMENTS // ne[0]))
    if t.dtype.np_dtype is not None:
        return t.elements()[0, 0, :n]
    if t.dtype.block_size == 1:
        return codec.bf16_to_f32(np.ndarray((n, ne[0]), np.uint16, t.raw(), 0, (nb[1], nb[0])))
    return codec.decode(t.rows_of_blocks(t.raw())[0, 0, :n].reshape(-1), t.dtype, (n, ne[0]))
