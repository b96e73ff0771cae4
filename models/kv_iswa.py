"""The cache of models whose layers attend in part to everything and in part to a sliding window (interleaved)."""

from __future__ import annotations

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import KVCacheFull

from .hparams import HParams
from .kv_cache import KVCache
from .kv_cells import Cell, Ints


class KVCacheISWA:
    """Two caches: `base` for the layers that see everything, `swa` for those with a window (hparams `n_swa`).

    `swa` has room for a window of each sequence and one batch only: what no later token can see is dropped after each
    decode (`settle`). Operations on sequences go to both.
    """

    def __init__(
        self,
        hp: HParams,
        size: int,
        n_seq_max: int = 1,
        type_k: DType = DType.F16,
        type_v: DType = DType.F16,
        flash_attn: bool = False,
        *,
        n_batch: int = 512,
    ) -> None:
        layers = range(hp.n_layer)
        full, window = ([il for il in layers if hp.is_swa(il) is swa] for swa in (False, True))
        self.n_swa = hp.n_swa
        self.base = KVCache(hp, size, n_seq_max, type_k, type_v, flash_attn, layers=full)
        size_swa = min(self.base.size, hp.n_swa * n_seq_max + n_batch)
        self.swa = KVCache(hp, size_swa, n_seq_max, type_k, type_v, flash_attn, layers=window, n_swa=hp.n_swa)

    @property
    def caches(self) -> tuple[KVCache, ...]:
        """The two caches."""
        return (self.base, self.swa)

    @property
    def size(self) -> int:
        """Cells of the base cache: the positions that a context has room for."""
        return self.base.size

    @property
    def used(self) -> int:
        """Cells of the base cache that are not empty."""
        return self.base.used

    @property
    def cells(self) -> list[Cell]:
        """The cells of the base cache."""
        return self.base.cells

    @property
    def n_seq_max(self) -> int:
        return self.base.n_seq_max

    @property
    def pos_max(self) -> Ints:
        """int32 [n_seq_max]: the largest position of each sequence, -1 where it has no cells."""
        return self.base.pos_max

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of all layers."""
        return self.base.nbytes + self.swa.nbytes

    def allocate(self, buft: str) -> None:
        """Give K and V their memory, zeroed."""
        for kv in self.caches:
            kv.allocate(buft)

    # -- slots ----------------------------------------------------------------------------------------------------

    def full(self, n: int) -> KVCacheFull:
        """The error where `n` tokens do not fit."""
        return self.base.full(n)

    def settle(self) -> None:
        """Drop the cells that no later token of their sequences sees (after a batch was decoded)."""
        kv = self.swa
        for s in np.flatnonzero(kv.seq.any(axis=1)).tolist():
            outside = kv.seq_pos_max(s) + 1 - kv.n_swa
            if outside >= 0 and kv.seq_pos_min(s) <= outside:
                kv.seq_rm(s, 0, outside + 1)

    # -- operations on sequences ----------------------------------------------------------------------------------

    def clear(self) -> None:
        """Empty all cells."""
        for kv in self.caches:
            kv.clear()

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position of a sequence, -1 where it has no cells."""
        return self.base.seq_pos_max(seq_id)

    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position of which all layers still have K and V, -1 where the sequence has no cells."""
        return self.swa.seq_pos_min(seq_id)

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Remove positions, see `KVCells.seq_rm`. False, with nothing changed, where the window before what remains
        was dropped already: the sequence could not be continued from there."""
        sequences = range(self.n_seq_max) if seq_id < 0 else (seq_id,)
        if not all(self._can_remove(s, max(p0, 0), p1) for s in sequences):
            return False
        for kv in self.caches:
            kv.seq_rm(seq_id, p0, p1)
        return True

    def _can_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        last = self.base.seq_pos_max(seq_id)
        if last < 0 or (0 <= p1 <= last) or p0 > last:
            return True  # the end stays
        pos = self.base.pos[self.base.seq[seq_id]]
        remain = pos[pos < p0]
        if not len(remain):
            return True
        needed = remain[remain > remain.max() + 1 - self.n_swa]
        return bool(np.isin(needed, self.swa.pos[self.swa.seq[seq_id]]).all())

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """Share cells with another sequence, see `KVCells.seq_cp`."""
        for kv in self.caches:
            kv.seq_cp(src, dst, p0, p1)

    def seq_keep(self, seq_id: int) -> None:
        """Remove all sequences but one."""
        for kv in self.caches:
            kv.seq_keep(seq_id)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions, see `KVCells.seq_add`."""
        for kv in self.caches:
            kv.seq_add(seq_id, p0, p1, delta)

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions, see `KVCells.seq_div`."""
        for kv in self.caches:
            kv.seq_div(seq_id, p0, p1, d)

    def defrag(self) -> None:
        """Close the holes between cells before the next step."""
        for kv in self.caches:
            kv.defrag()

    def __str__(self) -> str:
        return f"{self.base}\n{self.swa}"

    def _repr_html_(self) -> str:
        return "".join(kv._repr_html_() for kv in self.caches)  # pyright: ignore[reportPrivateUsage]
