"""The memory of models that have both: states of recurrent layers beside the KV cache of the others."""

from __future__ import annotations

from collections.abc import Callable

from pyggml.errors import KVCacheFull, whole
from pyggml.lock import changing

from .kv_cache import KVCache
from .kv_cells import Cell, Ints, change
from .kv_iswa import KVCacheISWA
from .recurrent import RecurrentCells


class HybridMemory:
    """`attn`, the cache of the layers that attend, and `states` of those that are recurrent (a layer may be both).

    Operations on sequences go to both, or where they raise or a signal comes to none.
    """

    def __init__(self, attn: KVCache | KVCacheISWA, states: RecurrentCells) -> None:
        self.attn, self.states = attn, states
        self.lock = states.lock = attn.lock

    @property
    def caches(self) -> tuple[KVCache, ...]:
        """The caches of `attn`."""
        return self.attn.caches

    @property
    def size(self) -> int:
        """Cells of the cache: the positions that a context has room for."""
        return self.attn.size

    @property
    def used(self) -> int:
        """Cells of the cache that are not empty."""
        return self.attn.used

    @property
    def cells(self) -> list[Cell]:
        """The cells of the cache."""
        return self.attn.cells

    @property
    def n_seq_max(self) -> int:
        return self.attn.n_seq_max

    @property
    def pos_max(self) -> Ints:
        """int32 [n_seq_max]: the largest position of each sequence, -1 where it is empty."""
        return self.attn.pos_max

    @property
    def nbytes(self) -> int:
        """Bytes of K, V and states of all layers."""
        return self.attn.nbytes + self.states.nbytes

    def allocate(self, buft: str) -> None:
        """Give all their memory, zeroed."""
        self.attn.allocate(buft)
        self.states.allocate(buft)

    def full(self, n: int) -> KVCacheFull:
        """The error where `n` tokens do not fit."""
        return self.attn.full(n)

    def settle(self) -> None:
        """Drop what no later token can see (after a batch was decoded)."""
        self.attn.settle()

    def defrag(self) -> None:
        """Close the holes between cells before the next step."""
        self.attn.defrag()

    # -- operations on sequences ----------------------------------------------------------------------------------

    @changing
    def clear(self) -> None:
        """Empty all sequences."""
        change((*self.caches, self.states), lambda m: m.clear())

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position of a sequence, -1 where it is empty."""
        return self.attn.seq_pos_max(seq_id)

    def seq_pos_min(self, seq_id: int) -> int:
        """As seq_pos_max: a state stands for its last position only."""
        return self.states.seq_pos_min(seq_id)

    @changing
    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Remove positions, see `KVCells.seq_rm`. False, with nothing changed, where either cannot: see
        `RecurrentCells.can_remove`, `KVCacheISWA.can_remove`."""
        first, end = whole("p0", p0), whole("p1", p1)
        if not (self.attn.can_remove(seq_id, first, end) and self.states.can_remove(seq_id, first, end)):
            return False
        return all(change((*self.caches, self.states), lambda m: m.seq_rm(seq_id, first, end)))

    @changing
    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """Let sequence `dst` go on from what `src` has, instead of what it had itself, see `RecurrentCells.seq_cp`."""

        def copy(m: KVCache | RecurrentCells) -> None:
            if src != dst:
                m.seq_rm(dst)
            m.seq_cp(src, dst, p0, p1)

        change((*self.caches, self.states), copy)

    @changing
    def seq_keep(self, seq_id: int) -> None:
        """Remove all sequences but one."""
        change((*self.caches, self.states), lambda m: m.seq_keep(seq_id))

    @changing
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions, see `KVCells.seq_add`."""
        self._move(lambda kv: kv.seq_add(seq_id, p0, p1, delta))

    @changing
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions, see `KVCells.seq_div`."""
        self._move(lambda kv: kv.seq_div(seq_id, p0, p1, d))

    def _move(self, op: Callable[[KVCache], None]) -> None:
        """Move positions in the caches by `op`, and those of the states with them: sequences that share cells too."""
        moved: list[Ints] = []

        def move(m: KVCache | RecurrentCells) -> None:
            if isinstance(m, RecurrentCells):
                m.place(moved[0])
            else:
                op(m)
                moved.append(m.pos_max)

        change((*self.caches, self.states), move)

    def __str__(self) -> str:
        return f"{self.attn}\n{self.states}"

    def _repr_html_(self) -> str:
        return "".join(kv._repr_html_() for kv in self.caches)  # pyright: ignore[reportPrivateUsage]
