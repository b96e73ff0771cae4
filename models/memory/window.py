"""The cells of layers that attend to a sliding window only, which forget what no later token sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..hparams import HParams
from .kv_cache import CacheOptions, KVCache
from .kv_cells import checked_seq, is_negative
from .kv_mask import Pos, first_visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Unpack


class WindowCache(KVCache):
    """The cache of `layers` with a window (hparams `n_swa`). `base` is the cache of the other layers, which see
    everything.

    There is room for a window of each sequence and one batch (in a transient cache, for one batch alone). After each
    decode `settle` drops the cells that no later token can see. It keeps `n_rewind` positions more, so that this number
    of tokens can be removed from the end of a sequence.
    """

    def __init__(
        self, hp: HParams, base: KVCache, n_batch: int, *, layers: Sequence[int], **options: Unpack[CacheOptions]
    ) -> None:
        size = base.size if base.transient else min(base.size, hp.n_swa * base.n_seq_max + n_batch)
        super().__init__(hp, size, layers=layers, n_swa=hp.n_swa, **options)
        self._base = base

    def settle(self) -> None:
        """Drop the cells that no later token of their sequences sees (after a batch was decoded)."""
        if self.transient:
            self.clear()
        else:
            self.forget(self._first_visible(np.maximum(self.pos_max + 1 - self.n_rewind, 0)))

    def can_remove(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Whether `seq_rm` may remove these positions: the window that the next token would then see must be there."""
        sequences = range(self.n_seq_max) if is_negative(seq_id) else (checked_seq(seq_id, self.n_seq_max),)
        return all(self._can_remove(s, max(p0, 0), p1) for s in sequences)

    def _can_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        last = self._base.seq_pos_max(seq_id)
        if last < 0 or (0 <= p1 <= last) or p0 > last:
            return True  # the end stays
        pos = self._base.pos[self._base.members.cells_of(seq_id)]
        remain = pos[pos < p0]
        if not len(remain):
            return True
        needed = remain[remain >= self._first_visible(int(remain.max()) + 1)]
        return bool(np.isin(needed, self.pos[self.members.cells_of(seq_id)]).all())

    def _first_visible(self, pos: Pos) -> Pos:
        return first_visible(pos, self.n_swa, self.swa_type)
