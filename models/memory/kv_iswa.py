"""The cache of models whose layers attend in part to everything and in part to a sliding window (interleaved)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pyggml.errors import KVCacheFull, whole
from pyggml.lock import changing

from ..hparams import HParams
from .kv_cache import CacheOptions, KVCache
from .kv_cells import Cell, Ints, change, checked_seq, is_negative
from .kv_mask import Pos, first_visible

if TYPE_CHECKING:
    from typing_extensions import Unpack


class KVCacheISWA:
    """Two caches: `base` for the layers that see everything, `swa` for those with a window (hparams `n_swa`).

    With `transient` both have the cells of one batch only. Else `swa` has room for a window of each sequence and one
    batch: what no later token can see is dropped after each decode (`settle`), but for `swa.n_rewind` positions more,
    so that as many tokens can be removed from the end of a sequence. Operations on sequences go to both, or
    where they raise or a signal comes to none.
    """

    def __init__(
        self,
        hp: HParams,
        size: int,
        *,
        n_batch: int = 512,
        transient: bool = False,
        **options: Unpack[CacheOptions],
    ) -> None:
        full, window = ([il for il in hp.cache_layers if hp.is_swa(il) is swa] for swa in (False, True))
        self.n_swa = hp.n_swa
        self.base = KVCache(hp, size, layers=full, transient=transient, **options)
        size_swa = self.base.size if transient else min(self.base.size, hp.n_swa * self.base.n_seq_max + n_batch)
        self.swa = KVCache(hp, size_swa, layers=window, n_swa=hp.n_swa, transient=transient, **options)
        self.lock = self.swa.lock = self.base.lock

    @property
    def states(self) -> None:
        """It has none."""

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
        if kv.transient:
            self.clear()
        else:
            kv.forget(self._first_visible(np.maximum(kv.pos_max + 1 - kv.n_rewind, 0)))

    def _first_visible(self, pos: Pos) -> Pos:
        return first_visible(pos, self.swa.n_swa, self.swa.swa_type)

    # -- operations on sequences ----------------------------------------------------------------------------------

    @changing
    def clear(self) -> None:
        """Empty all cells."""
        change(self.caches, KVCache.clear)

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position of a sequence, -1 where it has no cells."""
        return self.base.seq_pos_max(seq_id)

    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position of which all layers still have K and V, -1 where the sequence has no cells."""
        return self.swa.seq_pos_min(seq_id)

    @changing
    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Remove positions, see `KVCells.seq_rm`. False, with nothing changed, where the window before what remains
        was dropped already: the sequence could not be continued from there."""
        first, end = whole("p0", p0), whole("p1", p1)
        if not self.can_remove(seq_id, first, end):
            return False
        return all(change(self.caches, lambda kv: kv.seq_rm(seq_id, first, end)))

    def can_remove(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Whether `seq_rm` removes that."""
        sequences = range(self.n_seq_max) if is_negative(seq_id) else (checked_seq(seq_id, self.n_seq_max),)
        return all(self._can_remove(s, max(p0, 0), p1) for s in sequences)

    def _can_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        last = self.base.seq_pos_max(seq_id)
        if last < 0 or (0 <= p1 <= last) or p0 > last:
            return True  # the end stays
        pos = self.base.pos[self.base.seq[seq_id]]
        remain = pos[pos < p0]
        if not len(remain):
            return True
        needed = remain[remain >= self._first_visible(int(remain.max()) + 1)]
        return bool(np.isin(needed, self.swa.pos[self.swa.seq[seq_id]]).all())

    @changing
    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """Share cells with another sequence, see `KVCells.seq_cp`."""
        change(self.caches, lambda kv: kv.seq_cp(src, dst, p0, p1))

    @changing
    def seq_keep(self, seq_id: int) -> None:
        """Remove all sequences but one."""
        change(self.caches, lambda kv: kv.seq_keep(seq_id))

    @changing
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions, see `KVCells.seq_add`."""
        change(self.caches, lambda kv: kv.seq_add(seq_id, p0, p1, delta))

    @changing
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions, see `KVCells.seq_div`."""
        change(self.caches, lambda kv: kv.seq_div(seq_id, p0, p1, d))

    def defrag(self) -> None:
        """Close the holes between cells before the next step."""
        for kv in self.caches:
            kv.defrag()

    def __str__(self) -> str:
        return f"{self.base}\n{self.swa}"

    def _repr_html_(self) -> str:
        return "".join(kv._repr_html_() for kv in self.caches)  # pyright: ignore[reportPrivateUsage]
