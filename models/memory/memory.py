"""What a model remembers of its sequences: one `Memory` over stores, each of which keeps one kind of thing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pyggml.errors import KVCacheFull, whole
from pyggml.lock import Lock, changing
from pyggml.types import Ints

from .encoded_text import EncodedText
from .kv_cache import KVCache
from .kv_cells import Cell, SeqSets, change, is_negative
from .recurrent import RecurrentCells
from .state_file import Array, StateReader

if TYPE_CHECKING:
    from ..ubatch import UBatch

S = TypeVar("S", bound="Store")


class Store(Protocol):
    """One kind of thing that a memory keeps of sequences: cells with K and V, a window of them, states, encoded text.

    size, used, pos_max, lock   see `Memory`
    is_trial                    see `Copyable`
    """

    is_trial: bool
    size: int
    n_seq_max: int
    pos_max: Ints
    lock: Lock

    @property
    def used(self) -> int: ...
    @property
    def cells(self) -> list[Cell]: ...
    @property
    def nbytes(self) -> int: ...

    def copied(self: S) -> S:
        """The same, with arrays of its own."""
        ...

    def allocate(self, buft: str) -> None:
        """Give the tensors their memory, zeroed."""
        ...

    def full(self, n: int) -> KVCacheFull:
        """The error to raise when `n` tokens do not fit."""
        ...

    def slot(self, u: UBatch, taken: Sequence[Any]) -> Any:
        """Where the tokens of a ubatch can go; `taken`: the slots that the same decode has already. Changes nothing.
        Raises KVCacheFull."""
        ...

    def take(self, slot: Any, u: UBatch) -> None:
        """Put the tokens of a ubatch into a slot."""
        ...

    def undo(self, slots: Sequence[Any]) -> None:
        """Take back slots, in the order they were taken: all is as it was before the first of them. The tokens of the
        last one may not be in it, or only in part: a signal can come before `take`, or within it."""
        ...

    def can_remove(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Whether these positions of a sequence (seq_id < 0: of all sequences) can be removed from the store."""
        ...

    def settle(self) -> None:
        """Drop what no later token can see, after a batch was decoded."""
        ...

    def defrag(self) -> None:
        """Close holes between cells. A KVCache may do it before the next step, because a graph moves its data. Other
        stores do it at once."""
        ...

    def save(self, header: dict[str, Any], seq: int | None) -> list[Array]:
        """The arrays to save for sequence `seq`, or for all sequences (None). Numbers that are needed to read them are
        put into `header`, see `pyggml/llm/state/save_load.py`."""
        ...

    def load(self, r: StateReader, seq: int | None) -> Callable[[], None]:
        """Read and check the arrays that `save` gave, and return a function. When that function is called, it puts them
        in the place of everything that the store keeps, or keeps of sequence `seq`. It cannot fail, and nothing changes
        before it is called. Raises StateError for arrays that `save` does not give, and KVCacheFull when there is no
        room."""
        ...

    def clear(self) -> None: ...
    def seq_pos_max(self, seq_id: int) -> int: ...
    def seq_pos_min(self, seq_id: int) -> int: ...
    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool: ...
    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None: ...
    def seq_keep(self, seq_id: int) -> None: ...
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None: ...
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None: ...
    def _repr_html_(self) -> str: ...


class Memory:
    """What a model remembers. Printed, it shows what every cell holds.

    stores      what it consists of. The first one counts: `size`, `used`, `cells` and `pos_max` are its own
    caches      the stores that have cells with K and V, which come first
    states      the store of recurrent layers, or None
    encoding    in an encoder-decoder: the memory of the encoder's graphs, which fill the last store of this memory
    size        cells: the positions that a context has room for
    n_seq_max   how many sequences there may be
    equal_seqs  whether the sequences of a ubatch must have equally many tokens: states are read and written once for
                each sequence
    lock        held by operations on sequences and, as it is the context's, by everything that a context does

    Operations on sequences go to all stores, or to none when one of them raises or a signal comes. What is read through
    this object is without tokens that a text has put there on trial (`Lock.end_trial`); a store that somebody has kept
    may show some.
    """

    def __init__(self, *stores: Store, encoding: Memory | None = None) -> None:
        self._stores, self.encoding = stores, encoding
        self._caches = tuple(s for s in stores if isinstance(s, KVCache))
        self.states = next((s for s in stores if isinstance(s, RecurrentCells)), None)
        self._first = stores[0]
        self.size, self.n_seq_max = self._first.size, self._first.n_seq_max
        self._encoded = tuple(s for s in stores if isinstance(s, EncodedText)) if encoding is not None else ()
        self.equal_seqs = self.states is not None
        self.lock = self._first.lock
        for part in (*stores, *((encoding, *encoding.stores) if encoding is not None else ())):
            part.lock = self.lock

    @property
    def stores(self) -> tuple[Store, ...]:
        self.lock.end_trial()
        return self._stores

    @property
    def caches(self) -> tuple[KVCache, ...]:
        self.lock.end_trial()
        return self._caches

    @property
    def used(self) -> int:
        """Cells that are not empty."""
        return self.stores[0].used

    @property
    def cells(self) -> list[Cell]:
        """All cells as they are now, to look at."""
        return self.stores[0].cells

    @property
    def pos_max(self) -> Ints:
        """int32 [n_seq_max]: the largest position of each sequence, -1 for an empty one."""
        return self.stores[0].pos_max

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(s.nbytes for s in self._stores)

    @property
    def keeps_all(self) -> bool:
        """Whether every position of a sequence stays until it is removed, so that a sequence can be cut, or shared, at
        any position. A window drops positions, and a state stands for its last position only."""
        return len(self._stores) == len(self._caches) == 1

    def allocate(self, buft: str) -> None:
        """Give all tensors their memory, zeroed."""
        for store in self._stores:
            store.allocate(buft)

    # -- slots ----------------------------------------------------------------------------------------------------

    def full(self, n: int) -> KVCacheFull:
        """The error to raise when `n` tokens do not fit."""
        return self._first.full(n)

    def fills(self, store: Store) -> bool:
        """Whether graphs store into `store`, rather than only look at what an encoder stored there."""
        return store not in self._encoded

    def slot(self, u: UBatch, taken: Sequence[Slots]) -> Slots:
        """A slot in each store, None for one that graphs only look at. Changes nothing. Raises KVCacheFull."""
        looks_at = self._encoded
        return tuple(
            [None if s in looks_at else s.slot(u, [slots[i] for slots in taken]) for i, s in enumerate(self._stores)]
        )

    def take(self, slots: Slots, u: UBatch) -> None:
        """Put the tokens of a ubatch into their slots."""
        for store, slot in zip(self._stores, slots, strict=True):
            if slot is not None:
                store.take(slot, u)

    def undo(self, taken: Sequence[Slots]) -> None:
        """Take back slots, at least those of one ubatch, in the order they were taken."""
        for i, store in enumerate(self._stores):
            if self.fills(store):
                store.undo([slots[i] for slots in taken])

    def settle(self) -> None:
        """Drop what no later token can see (after a batch was decoded)."""
        for store in self._stores:
            store.settle()

    def defrag(self) -> None:
        """Close the holes between cells before the next step."""
        for store in self._stores:
            store.defrag()

    # -- operations on sequences ----------------------------------------------------------------------------------

    @changing
    def clear(self) -> None:
        """Empty all sequences."""
        change(self.stores, lambda s: s.clear())

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position of a sequence, -1 for an empty one."""
        return self.stores[0].seq_pos_max(seq_id)

    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position of a sequence that all stores still have, -1 for an empty one."""
        return max(s.seq_pos_min(seq_id) for s in self.stores)

    def can_remove(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Whether `seq_rm` with these arguments would return True."""
        return all(s.can_remove(seq_id, p0, p1) for s in self.stores)

    @changing
    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Remove the positions p0 <= p < p1 (p1 < 0: to the end) of a sequence (seq_id < 0: of all). False, with
        nothing changed, when the sequence could not go on from there: a window has dropped what the next token sees, or
        a state from before was not kept."""
        first, end = whole("p0", p0), whole("p1", p1)
        if not self.can_remove(seq_id, first, end):
            return False
        if not is_negative(seq_id) and all(s.seq_pos_max(seq_id) < max(first, 0) for s in self.stores):
            return True  # no store has such positions
        return all(change(self.stores, lambda s: s.seq_rm(seq_id, first, end)))

    @changing
    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """Let the tokens of sequence `src` in a range of positions belong to `dst` too; no data moves. In a memory with
        states `dst` loses the tokens that it had, because it goes on from the state of `src`. Raises GGMLError for
        positions without a state, and BatchError when `dst` has tokens that have seen another encoded text."""

        def copy(store: Store) -> None:
            if self.states is not None and src != dst:
                store.seq_rm(dst)
            store.seq_cp(src, dst, p0, p1)

        change(self.stores, copy)

    @changing
    def seq_keep(self, seq_id: int) -> None:
        """Remove all sequences but one."""
        change(self.stores, lambda s: s.seq_keep(seq_id))

    @changing
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Add `delta` to the positions p0 <= p < p1 of a sequence, see `KVCells.seq_add`."""
        self._move(lambda s: s.seq_add(seq_id, p0, p1, delta))

    @changing
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide the positions p0 <= p < p1 of a sequence by `d`, see `KVCells.seq_div`."""
        self._move(lambda s: s.seq_div(seq_id, p0, p1, d))

    def _move(self, op: Callable[[Store], None]) -> None:
        """Move positions in the stores by `op`. Afterwards the states take over the positions of the cells, because a
        sequence that shares moved cells has moved too."""
        moved: list[Ints] = []

        def move(store: Store) -> None:
            if moved and isinstance(store, RecurrentCells):
                store.place(moved[0])
            else:
                op(store)
                moved.append(store.pos_max)

        change(self.stores, move)

    # -- encoded text ---------------------------------------------------------------------------------------------

    @changing
    def begin(self, seqs: Sequence[int], n: int) -> None:
        """Empty the sequences `seqs`, so that the encoder can store their texts, of `n` tokens. Raises KVCacheFull,
        with nothing changed, when these will not fit."""

        def empty(store: Store) -> None:
            for s in seqs:
                store.seq_rm(s)
            if isinstance(store, EncodedText):
                store.require_room(n)

        change(self.stores, empty)

    def check_encoded(self, seq: Ints, sets: SeqSets | None) -> None:
        """Raise BatchError when the model reads an encoded text, and one of the sequences of the tokens has none, or
        those of a token have several. `seq` has the first sequence of each token, `sets` all of them."""
        for text in self._encoded:
            text.require(seq, sets)

    def __str__(self) -> str:
        return "\n".join(map(str, self.stores))

    def _repr_html_(self) -> str:
        return "".join(s._repr_html_() for s in self.stores)  # pyright: ignore[reportPrivateUsage]


Slots = tuple[Any, ...]  # the slots of a ubatch, one in each store
