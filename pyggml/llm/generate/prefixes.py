"""What two texts begin with alike, which a context evaluates once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyggml.models.memory.memory import Memory

    from ..media_prompt import PlacedMedia


_STRIDE = 64  # tokens that are compared at once


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences (of the same type) begin with alike."""
    n, i = min(len(a), len(b)), 0
    while i < n and a[i : i + _STRIDE] == b[i : i + _STRIDE]:
        i += _STRIDE
    for at in range(i, n):  # a loop, and no `next`: servers compare each prompt with hundreds of texts
        if a[at] != b[at]:
            return at
    return n


def keep_prefix(
    memory: Memory, seq: int, held: Sequence[int], wanted: Sequence[int], media: PlacedMedia | None = None
) -> int:
    """Cut a sequence that has evaluated `held` back to the tokens that `wanted` begins with too. The last token of
    `wanted` is never kept: it must be evaluated again for its logits. Returns how many tokens are kept. When the
    sequence cannot be cut there, because a window or a state has moved on, it is emptied and 0 is returned. `media`:
    what `wanted` has of pictures, none of which is cut in two where its rows see each other."""
    n = min(common_prefix(held, wanted), len(wanted) - 1)
    n = n if media is None else media.whole(n)
    if not memory.seq_rm(seq, n):
        memory.seq_rm(seq)
        n = 0
    return n
