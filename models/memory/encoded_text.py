"""What an encoder gave of each sequence's text, for the layers of the decoder to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyggml.errors import BatchError, KVCacheFull, whole
from pyggml.types import Ints

from ..hparams import HParams
from .kv_cache import CacheOptions, KVCache
from .kv_cells import SeqSets, checked_seq

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EncodedText(KVCache):
    """K and V of the encoded text, which the decoder's layers attend to. `decoder` is the cache of the decoder's own
    tokens.

    Positions are those of the decoder's tokens, so an operation on a range of positions leaves the encoded text alone.
    A sequence that is removed as a whole loses its text. A sequence that becomes a copy of another gets the other's
    text.
    """

    def __init__(self, hp: HParams, decoder: KVCache, **options: Unpack[CacheOptions]) -> None:
        super().__init__(hp, max(decoder.size, hp.n_heard), cross=True, **options)
        self._decoder = decoder

    def seq_pos_min(self, seq_id: int) -> int:
        """-1: the text has no positions of the decoder's."""
        return -1

    def seq_rm(self, seq_id: int, p0: int = 0, p1: int = -1) -> bool:
        """Forget the text of a sequence (seq_id < 0: of all) whose positions are all removed (p0 <= 0, p1 < 0)."""
        first, end = whole("p0", p0), whole("p1", p1)
        return first > 0 or end >= 0 or super().seq_rm(seq_id)

    def seq_cp(self, src: int, dst: int, p0: int = 0, p1: int = -1) -> None:
        """Let `dst` have the text of `src` instead of its own. Raises BatchError when `dst` has tokens that have seen
        another text."""
        a, b = (checked_seq(s, self.n_seq_max) for s in (src, dst))
        if self._decoder.pos_max[b] >= 0 and self._differ(a, b):
            raise BatchError(f"sequence {dst} has tokens that have seen another encoded text: remove it first")
        if a != b:
            super().seq_rm(b)
            super().seq_cp(a, b)

    def seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        """The text stays where it is."""

    def seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        """The text stays where it is."""

    def require_room(self, n: int) -> None:
        """Raises KVCacheFull when a text of `n` tokens does not fit."""
        free = self.size - self.used
        if free < n:
            text = f"{n} cells are needed; {free} of the {self.size} cells for encoded text are free"
            raise KVCacheFull(text, n, free)

    def require(self, seq: Ints, sets: SeqSets | None) -> None:
        """Raises BatchError for tokens of sequences `seq`, or of all of `sets`, that have no encoded text to see, or
        when the sequences of one token have different ones."""
        texts = self.pos_max
        for s in sorted({s for ids in sets for s in ids} if sets is not None else set(seq.tolist())):
            if texts[s] < 0:
                raise BatchError(f"sequence {s} has no encoded text to answer: `encode` comes before `decode`")
        for first, *others in sets or ():
            for s in others:
                if self._differ(first, s):
                    raise BatchError(f"a token is of sequences {first} and {s}, whose encoded texts differ")

    def _differ(self, a: int, b: int) -> bool:
        """Whether two sequences have different texts."""
        return bool((self.members.cells_of(a) != self.members.cells_of(b)).any())
