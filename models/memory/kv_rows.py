"""K and V of single cells, whatever the layout of the cache."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np

from pyggml.tensor import Tensor

from .state_file import Array

if TYPE_CHECKING:
    from .kv_cache import KVCache


def kv_rows(kv: KVCache) -> list[Array]:
    """K, and V unless it is in K, of each layer that has memory, one after the other. They are zero-copy views: row i
    holds the stored bytes of cell i.

    Rows are uint8; those of a transposed V unsigned integers as wide as its elements.
    """
    rows: list[Array] = []
    for i, k in compress(enumerate(kv.k_l), kv.holds):
        rows.append(_rows(k, kv.size))
        if i < len(kv.v_l):
            rows.append(_columns(kv.v_l[i], kv.size) if kv.v_trans else _rows(kv.v_l[i], kv.size))
    return rows


def _rows(t: Tensor, size: int) -> Array:
    memory: Array = t.raw()
    return memory.reshape(size, -1)


def _columns(t: Tensor, size: int) -> Array:
    width = t.dtype.type_size
    unsigned: np.dtype[Any] = np.dtype(f"u{width}")
    return np.ndarray((size, t.n_elements // size), unsigned, t.raw(), 0, (width, width * size))
