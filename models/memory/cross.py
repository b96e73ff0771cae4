"""The memory of encoder-decoders: what the encoder gave of each sequence's text, beside the decoder's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyggml.errors import BatchError, KVCacheFull, whole
from pyggml.lock import changing

from ..hparams import HParams
from .kv_cache import CacheOptions, KVCache
from .kv_cells import Cell, Ints, change, checked_seq

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EncoderMemory:
    """What the encoder's graphs use: `encoder`, cells of one batch that nothing remembers, and `cross`, which they fill
    with K and V of each of the decoder's layers."""

    def __init__(self, encoder: KVCache, cross: KVCache) -> None:
        self.encoder, self.cross = encoder, cross

    @property
    def states(self) -> None:
        """It has none."""

    @property
    def caches(self) -> tuple[KVCache, ...]:
        """The encoder's first."""
        return (self.encoder, self.cross)

    @property
    def size(self) -> int:
        """Tokens that can be encoded together."""
        return self.encoder.size

    @property
    def n_seq_max(self) -> int:
        return self.cross.n_seq_max


class CrossMemory:
    """`decoder`, the cache of the decoder's tokens, and `cross`, K and V that its layers see of the encoded text.

    Positions are the decoder's: operations on a range of them leave the encoded text alone. A sequence that is removed
    as a whole, or of which another becomes a copy, has none any more, or the other's. Operations go to both, or where
    they raise or a signal comes to none.
    """

    def __init__(self, hp: HParams, size: int, *, n_batch: int = 512, **options: Unpack[CacheOptions]) -> None:
        self.decoder = KVCache(hp, size, **options)
        self.cross = KVCache(hp, size, cross=True, **options)
        encoder = KVCache(hp, min(self.decoder.size, n_batch), transient=True, **options)
        self.encoding = EncoderMemory(encoder, self.cross)
        self.lock = self.cross.lock = encoder.lock = self.decoder.lock

    @property
    def states(self) -> None:
        """It has none."""

    @property
    def caches(self) -> tuple[KVCache, ...]:
        """The decoder's first."""
        return (self.decoder, self.cross)

    @property
    def size(self) -> int:
        """Cells of the decoder's cache: the positions that a context has room for. The other has as many."""
        return self.decoder.size

    @property
    def used(self) -> int:
        """Cells of the decoder's cache that are not empty."""
        return self.decoder.used

    @property
    def cells(self) -> list[Cell]:
        """The cells of the decoder's cache."""
        return self.decoder.cells

    @property
    def n_seq_max(self) -> int:
        return self.decoder.n_seq_max

    @property
    def pos_max(self) -> Ints:
        """int32 [n_seq_max]: the largest position of each sequence, -1 where it has no cells."""
        return self.decoder.pos_max

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of all layers."""
        return self.decoder.nbytes + self.cross.nbytes

    def allocate(self, buft: str) -> None:
        """Give K and V their memory, zeroed."""
        for kv in self.caches:
            kv.allocate(buft)

    def full(self, n: int) -> KVCacheFull:
        """The error where `n` tokens do not fit."""
        return self.decoder.full(n)

    def settle(self) -> None:
        """Drop what no later token sees: the encoder's cells."""
        self.encoding.encoder.clear()

    # -- the encoded text -----------------------------------------------------------------------------------------

    @changing
    def begin(self, seqs: Sequence[int], n: int) -> None:
        """Empty sequences, for the encoder to fill with `n` cells. Raises KVCacheFull, with nothing changed, where
        these will not fit."""

        def empty(kv: KVCache) -> None:
            for s in seqs:
                kv.seq_rm(s)
            free = kv.size - kv.used
            if kv.cross and free < n:
                text = f"{n} cells are needed; {free} of the {kv.size} cells for encoded text are free"
                raise KVCacheFull(text, n, free)

        change(self.caches, empty)

    def require(self, seq: Ints, sets: Sequence[tuple[int, ...]] | None) -> None:
        """Raises BatchError where tokens of sequences `seq`, or of all of `sets`, have no encoded text to see, or where
        those of one token see different ones."""
        texts = self.cross.pos_max
        for s in sorted({s for ids in sets for s in ids} if sets is not None else set(seq.tolist())):
            if texts[s] < 0:
                raise BatchError(f"sequence {s} has no encoded text to answer: `encode` comes before `decode`")
        for first, *others in sets or ():
            for s in others:
                if (self.cross.seq[first] != self.cross.seq[s]).any():
                    raise BatchError(f"a token is of sequences {first} and {s}, whose encoded texts differ")

    # -- operations on sequences ----------------------------------------------------------------------------------

    @changing
    def clear(self) -> None:
        """Empty all sequences."""
        change(self.caches, KVCache.clear)

    def seq_pos_max(self, seq_id: int) -> int:
        """The largest position of a sequence, -1 where the decoder has none of it."""
        return self.decoder.seq_pos_max(seq_id)

    def seq_pos_min(self, seq_id: int) -> int:
        """The smallest position of a sequence, -1 where the decoder has none of it."""
        return self.decoder.seq_pos_min(seq_id)

    @changing
    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Remove positions, see `KVCells.seq_rm`; with all of them (p0 <= 0, p1 < 0) the encoded text."""
        first, end = whole("p0", p0), whole("p1", p1)
        caches = self.caches if first <= 0 and end < 0 else (self.decoder,)
        return all(change(caches, lambda kv: kv.seq_rm(seq_id, first, end)))

    @changing
    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """Share cells with another sequence, see `KVCells.seq_cp`, and the encoded text, in the place of its own.
        Raises BatchError where that would leave it tokens that have seen another text."""

        def copy(kv: KVCache) -> None:
            if not kv.cross:
                kv.seq_cp(src, dst, p0, p1)
            elif src != dst:
                kv.seq_rm(dst)
                kv.seq_cp(src, dst)

        a, b = (checked_seq(s, self.n_seq_max) for s in (src, dst))
        if self.decoder.pos_max[b] >= 0 and (self.cross.seq[a] != self.cross.seq[b]).any():
            raise BatchError(f"sequence {dst} has tokens that have seen another encoded text: remove it first")
        change(self.caches, copy)

    @changing
    def seq_keep(self, seq_id: int) -> None:
        """Remove all sequences but one."""
        change(self.caches, lambda kv: kv.seq_keep(seq_id))

    @changing
    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """Move positions of the decoder's, see `KVCells.seq_add`."""
        self.decoder.seq_add(seq_id, p0, p1, delta)

    @changing
    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """Divide positions of the decoder's, see `KVCells.seq_div`."""
        self.decoder.seq_div(seq_id, p0, p1, d)

    def defrag(self) -> None:
        """Close the holes between cells before the next step."""
        for kv in self.caches:
            kv.defrag()

    def __str__(self) -> str:
        return f"{self.decoder}\n{self.cross}"

    def _repr_html_(self) -> str:
        return "".join(kv._repr_html_() for kv in self.caches)  # pyright: ignore[reportPrivateUsage]
