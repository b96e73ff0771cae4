"""Two ways to go on when a text becomes longer than the context: context shift frees cells, self-extend stretches the
positions that a model knows.

Context shift: when the cache is full, the oldest tokens after the first `n_keep` are dropped, and later tokens move
down by as many positions. Generation never has to end, and the model sees the start and the recent past.

Self-extend (arXiv:2401.01325), as llama.cpp does it: tokens are grouped in windows of `grp_attn_w`; when a window is
complete, each `grp_attn_n` neighbours in it get one position. Only positions change: each token keeps its cell.

    w = 8, n = 4     0 1 2 3 4 5 6 7 8 9 10      tokens
                     0 0 0 0 1 1 1 1 2 3  4      positions, once the first window is complete
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyggml.errors import GGMLError, whole

from ..interrupt import uninterrupted

if TYPE_CHECKING:
    from ..decoder import Decoder


def tokens_to_keep(n_keep: int, n_prompt: int, add_bos: bool) -> int:
    """What `--keep` means for a prompt of `n_prompt` tokens: negative or too many is all of them; the token that begins
    the text is always kept and not counted."""
    return n_prompt if n_keep < 0 or n_keep > n_prompt else min(n_keep + add_bos, n_prompt)


@dataclass
class LongContext:
    """Makes room for the next tokens of sequence `seq`; call `make_room` before each decode.

    n_keep          tokens at the start that a context shift leaves alone
    n_discard       tokens that a shift drops; 0: half of those after n_keep
    context_shift   whether to shift at all
    grp_attn_n      group size of self-extend; 1: no self-extend. With self-extend there is no context shift
    grp_attn_w      the window of self-extend, a multiple of the group size
    moved           whether positions were changed: they are no longer the places of the tokens in the text
    n_dropped       how many tokens after the first n_keep context shifts have dropped

    Raises GGMLError for sizes that make no sense.
    """

    ctx: Decoder
    n_keep: int = 0
    n_discard: int = 0
    context_shift: bool = True
    grp_attn_n: int = 1
    grp_attn_w: int = 512
    seq: int = 0
    n_cells: int | None = None  # cells that the sequence may take; None: all
    moved: bool = field(default=False, init=False)
    n_dropped: int = field(default=0, init=False)
    _windows: int = field(default=0, init=False)  # complete ones

    def __post_init__(self) -> None:
        n, w = whole("grp_attn_n", self.grp_attn_n), whole("grp_attn_w", self.grp_attn_w)
        if n < 1 or w < n or w % n:
            raise GGMLError(f"self-extend: the window {w} is not a multiple of the group size {n}")
        if whole("n_keep", self.n_keep) < 0 or whole("n_discard", self.n_discard) < 0:
            raise GGMLError(f"context shift: n_keep {self.n_keep} and n_discard {self.n_discard} must not be negative")

    @property
    def n_past(self) -> int:
        """The position of the next token."""
        return self.ctx.memory.seq_pos_max(self.seq) + 1

    @property
    def size(self) -> int:
        """The cells that the sequence may take."""
        return self.ctx.n_ctx if self.n_cells is None else self.n_cells

    def parts(self, prompt: Sequence[int]) -> Iterator[Sequence[int]]:
        """Cut a prompt into parts, which are decoded one after the other. The context is not shifted for a prompt;
        self-extend groups each window when it is complete."""
        n = self.ctx.n_batch if self.grp_attn_n == 1 else min(self.ctx.n_batch, self.grp_attn_w)
        for i in range(0, len(prompt), n):
            if self.grp_attn_n > 1:
                self._group()
            yield prompt[i : i + n]

    def make_room(self, n: int = 1) -> bool:
        """Prepare for `n` more tokens. False when the context is full and must not, or cannot, be shifted."""
        if self.grp_attn_n > 1:
            self._group()
            return self.ctx.memory.used + n <= self.ctx.n_ctx
        if self.n_past + n < self.size:
            return True
        return self.context_shift and self._shift(n)

    def _shift(self, n: int) -> bool:
        memory, n_past = self.ctx.memory, self.n_past
        n_discard = self.n_discard or (n_past - self.n_keep) // 2
        n_discard = min(n_discard, n_past - self.n_keep)
        if n_discard < 1 or n_past - n_discard + n > self.size:
            return False
        end = self.n_keep + n_discard
        with uninterrupted():
            if not memory.seq_rm(self.seq, self.n_keep, end):
                return False
            memory.seq_add(self.seq, end, -1, -n_discard)
            self.moved = True
            self.n_dropped += n_discard
        return True

    def _group(self) -> None:
        """Group each window that is complete. Its tokens and all later ones first get back the positions that they have
        in the text. Then the positions in the window are divided, and the gap after it is closed."""
        memory, w, short = self.ctx.memory, self.grp_attn_w, self.grp_attn_w // self.grp_attn_n
        while self.n_past >= self._windows * short + w:
            start, gap = self._windows * w, self._windows * (w - short)
            with uninterrupted():
                memory.seq_add(self.seq, self._windows * short, -1, gap)
                memory.seq_div(self.seq, start, start + w, self.grp_attn_n)
                memory.seq_add(self.seq, start + w, -1, short - w - gap)
                self._windows += 1
                self.moved = True
