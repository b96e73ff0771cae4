"""One lowered program for graphs that differ in a size alone: what depends on it is patched before each run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...tensor import Var
from .lower import N_THREADS_WORD, OP_WORDS, WORK_WORD, Lowered

Words = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class Variant(NamedTuple):
    """The same graph, in the same memory, lowered for another value of the variable."""

    value: int
    lowered: Lowered


def vary(top: Lowered, var: Var, variants: Sequence[Variant]) -> bool:
    """Make `top`, lowered for `var.hi`, serve all values of `var`: words that differ between it and the first variant
    become binds, linear in the value. Threads stay as they are for `var.hi`; scratch memory suffices for all.

    False, with `top` unchanged, where another variant shows that they are not linear, or is another graph.
    """
    first = variants[0]
    if any(len(v.lowered.ops) != len(top.ops) for v in variants):
        return False
    words = _words(top)
    where = np.nonzero(words != _words(first.lowered))
    at_top, at_first = words[where], _words(first.lowered)[where]
    stride, rest = np.divmod(at_top - at_first, var.hi - first.value)
    base = at_top - stride * var.hi
    if rest.any():
        return False
    for v in variants[1:]:
        words[where] = base + stride * v.value
        if not np.array_equal(words, _words(v.lowered)):
            return False
    start = top.ops.__array_interface__["data"][0]
    addresses = (start + 8 * (where[0] * OP_WORDS + where[1])).tolist()
    if {a for a, *_ in top.binds} & set(addresses):
        return False  # a word that two variables move
    top.binds += [(a, int(b), int(s), var) for a, b, s in zip(addresses, base, stride, strict=True)]
    top.work_size = max(top.work_size, *(v.lowered.work_size for v in variants))
    return True


def _words(low: Lowered) -> Words:
    """What the records say of the op, as int64 [n_ops, words]: all but the threads, the scratch memory and the plan."""
    words: Words = np.array(low.words()[:, :WORK_WORD])
    words[:, N_THREADS_WORD] = 0
    return words
