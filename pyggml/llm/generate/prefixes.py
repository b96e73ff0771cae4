"""What two texts begin with alike, which a context evaluates once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyggml.models.memory.memory import Memory

    from ..media_prompt import PlacedMedia


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences (of the same type) begin with alike."""
    n = min(len(a), len(b))
    return n if a[:n] == b[:n] else bisect_left(range(n), True, key=lambda i: a[: i + 1] != b[: i + 1])


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
