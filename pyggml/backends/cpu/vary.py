"""One lowered program for graphs that differ in sizes alone: what depends on it is patched before each run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...tensor import Var
from .lower import N_THREADS_WORD, OP_WORDS, WORK_WORD, Lowered

Words = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class Variant(NamedTuple):
    """The same graph, in the same memory, lowered for other values of the variables."""

    values: Sequence[int]
    lowered: Lowered


def vary(top: Lowered, variables: Sequence[Var], variants: Sequence[Variant]) -> bool:
    """Make `top`, lowered for the largest value of each variable, serve all their values: words that differ between it
    and the variant in which one variable alone is less become binds, linear in its value. Threads stay as they are for
    the largest; scratch memory suffices for all.

    False, with `top` unchanged, where the last variant, which is to check with, shows that they are not linear, where
    several variables move one word, or a variant is another graph.
    """
    if any(len(v.lowered.ops) != len(top.ops) for v in variants):
        return False
    *alone, check = variants
    words = _words(top)
    expected: Words = np.array(words)
    binds = {bind[0]: bind for bind in top.binds}
    start = top.ops.__array_interface__["data"][0]
    for i, (var, variant) in enumerate(zip(variables, alone, strict=True)):
        other = _words(variant.lowered)
        where = np.nonzero(words != other)
        at_top = words[where]
        stride, rest = np.divmod(at_top - other[where], var.hi - variant.values[i])
        base = at_top - stride * var.hi
        addresses = (start + 8 * (where[0] * OP_WORDS + where[1])).tolist()
        if rest.any() or not binds.keys().isdisjoint(addresses):
            return False
        expected[where] = base + stride * check.values[i]
        binds |= {a: (a, int(b), int(s), var) for a, b, s in zip(addresses, base, stride, strict=True)}
    if not np.array_equal(expected, _words(check.lowered)):
        return False
    top.binds = list(binds.values())
    top.work_size = max(top.work_size, *(v.lowered.work_size for v in variants))
    return True


def _words(low: Lowered) -> Words:
    """What the records say of the op, as int64 [n_ops, words]: all but the threads, the scratch memory and the plan."""
    words: Words = np.array(low.words()[:, :WORK_WORD])
    words[:, N_THREADS_WORD] = 0
    return words
