"""How tensors of a checkpoint become tensors of a GGUF. Each move is declared once, with its inverse.

A `Move` changes where elements lie. It works on arrays of any type and keeps their bits. A `Value` changes the elements
and makes them F32. A `Merged` tensor of a checkpoint becomes several of a GGUF. All take the model's sizes from the
GGUF metadata alone, because the way back has nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pyggml import ops
from pyggml.tensor import Tensor

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that moves need."""

    n_head: int
    n_head_kv: int
    head_k: int
    head_v: int
    n_rot: int
    ints: Callable[[str], int]  # any other key of the architecture, such as `ssm.group_count`


Shape = tuple[int, ...]


def _same(shape: Shape, sizes: Sizes) -> Shape:
    return shape


@dataclass(frozen=True)
class Move:
    """Changes where elements lie. `there(array, sizes)` gives the GGUF's array, `back` the checkpoint's; `shape` gives
    the shape of the GGUF's array before anything is read."""

    there: Callable[[Array, Sizes], Array]
    back: Callable[[Array, Sizes], Array]
    shape: Callable[[Shape, Sizes], Shape] = _same


@dataclass(frozen=True)
class Value:
    """Changes elements. `there(array)` gives the GGUF's values, `back` the checkpoint's; both are F32. `record(tensor)`
    records ops that do what `there` does, in graphs that train what the checkpoint has."""

    there: Callable[[Array], Array]
    back: Callable[[Array], Array]
    record: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Merged:
    """A tensor of the checkpoint that holds several tensors of a GGUF, one for each of the `roles`. `there(array,
    sizes)` gives them in the order of `roles`; `back` merges them again."""

    roles: tuple[str, ...]
    there: Callable[[Array, Sizes], list[Array]]
    back: Callable[[list[Array], Sizes], Array]
    shapes: Callable[[Shape, Sizes], list[Shape]]


def then(*moves: Move) -> Move:
    """Several moves, one after the other."""

    def there(a: Array, s: Sizes) -> Array:
        for m in moves:
            a = m.there(a, s)
        return a

    def back(a: Array, s: Sizes) -> Array:
        for m in reversed(moves):
            a = m.back(a, s)
        return a

    def shape(sh: Shape, s: Sizes) -> Shape:
        for m in moves:
            sh = m.shape(sh, s)
        return sh

    return Move(there, back, shape)


# -- rope -----------------------------------------------------------------------------------------------------------


def _pairs(n_heads: Callable[[Sizes], int]) -> Move:
    """Bring the two elements that a rope turns together side by side, as `norm` ropes want them. In checkpoints they
    are half a head apart."""

    def turn(a: Array, s: Sizes, there: bool) -> Array:
        heads = a.reshape(n_heads(s), -1, *a.shape[1:])
        rot = min(s.n_rot, heads.shape[1])  # the other elements of a head do not turn
        grid = (2, rot // 2) if there else (rot // 2, 2)
        turned = _swap(heads[:, :rot].reshape(len(heads), *grid, *a.shape[1:]), 1, 2)
        turned = turned.reshape(len(heads), rot, *a.shape[1:])
        return np.concatenate((turned, heads[:, rot:]), 1).reshape(a.shape)

    return Move(lambda a, s: turn(a, s, True), lambda a, s: turn(a, s, False))


ROPE_Q, ROPE_K = _pairs(lambda s: s.n_head), _pairs(lambda s: s.n_head_kv)
ROPE_PAIRS = {"attn_q": ROPE_Q, "attn_k": ROPE_K}
# The other way: from neighbours in the checkpoint to halves of a head in the GGUF.
ROPE_HALVES = {role: Move(move.back, move.there) for role, move in ROPE_PAIRS.items()}

# -- values ---------------------------------------------------------------------------------------------------------

PLUS_ONE = Value(lambda a: a + np.float32(1), lambda a: a - np.float32(1), lambda t: ops.scale_bias(t, 1.0, 1.0))
A_LOG = Value(lambda a: -np.exp(a), lambda a: np.log(-a), lambda t: ops.neg(ops.exp(t)))

# -- layouts --------------------------------------------------------------------------------------------------------


def _swap(a: Array, first: int, second: int) -> Array:
    return np.swapaxes(a, first, second)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _transposed(a: Array, s: Sizes) -> Array:
    return _swap(a, -1, -2)


TRANSPOSED = Move(_transposed, _transposed, lambda sh, s: (*sh[:-2], sh[-1], sh[-2]))
CONV1D = Move(  # [channels, 1, kernel]
    lambda a, s: a.reshape(a.shape[0], a.shape[-1]),
    lambda a, s: a.reshape(a.shape[0], 1, a.shape[1]),
    lambda sh, s: (sh[0], sh[-1]),
)
ROW = Move(lambda a, s: a.reshape(-1), lambda a, s: a.reshape(1, -1), lambda sh, s: (int(np.prod(sh)),))  # [1, n]
COLUMN = Move(lambda a, s: a.reshape(-1, 1), lambda a, s: a.reshape(-1), lambda sh, s: (int(np.prod(sh)), 1))


def in_groups(key: str) -> Move:
    """A vector becomes a matrix with one row for each group; `key` names the number of groups."""
    return Move(
        lambda a, s: a.reshape(s.ints(key), -1),
        lambda a, s: a.reshape(-1),
        lambda sh, s: (s.ints(key), sh[0] // s.ints(key)),
    )


def by_kind(group: Callable[[Sizes], tuple[int, int, int]]) -> Move:
    """Sort the rows of a joined Q, K and V weight. The checkpoint has them by groups of heads; the GGUF has all rows of
    Q, then all of K, then all of V. `group(sizes)` gives the number of groups, and how many heads of Q and of K (and
    as many of V) each group has."""

    def there(a: Array, s: Sizes) -> Array:
        n, q, k = group(s)
        rows = a.reshape(n, q + 2 * k, -1, *a.shape[1:])
        parts = (rows[:, :q], rows[:, q : q + k], rows[:, q + k :])
        return np.concatenate([p.reshape(-1, *a.shape[1:]) for p in parts])

    def back(a: Array, s: Sizes) -> Array:
        n, q, k = group(s)
        heads = a.reshape(n * (q + 2 * k), -1, *a.shape[1:])
        cuts = (0, n * q, n * (q + k), n * (q + 2 * k))
        parts = [heads[i:j].reshape(n, (j - i) // n, *heads.shape[1:]) for i, j in pairwise(cuts)]
        return np.concatenate(parts, 1).reshape(a.shape)

    return Move(there, back)


QKV_PER_HEAD = by_kind(lambda s: (s.n_head, 1, 1))
QKV_PER_GROUP = by_kind(lambda s: (s.n_head_kv, s.n_head // s.n_head_kv, 1))


def _halves_shapes(shape: Shape, s: Sizes) -> list[Shape]:
    half = (*shape[:-2], shape[-2] // 2, shape[-1])
    return [half, half]


def halves(*roles: str) -> Merged:
    """The first half of the rows (of each matrix) for the first role, the second half for the second."""
    return Merged(
        roles,
        lambda a, s: np.split(a, 2, -2),
        lambda parts, s: np.concatenate(parts, -2),
        _halves_shapes,
    )


def halves_transposed(*roles: str) -> Merged:
    """As `halves`, for matrices that are stored [inputs, outputs]."""
    return Merged(
        roles,
        lambda a, s: [_transposed(p, s) for p in np.split(a, 2, -1)],
        lambda parts, s: np.concatenate([_transposed(p, s) for p in parts], -1),
        lambda sh, s: _halves_shapes((*sh[:-2], sh[-1], sh[-2]), s),
    )


def alternating(*roles: str, transposed: bool) -> Merged:
    """Even outputs for the first role, odd ones for the second; `transposed`: matrices are [inputs, outputs]."""

    def there(a: Array, s: Sizes) -> list[Array]:
        parts = [a[..., 0::2], a[..., 1::2]]
        return [_transposed(p, s) for p in parts] if transposed else parts

    def back(parts: list[Array], s: Sizes) -> Array:
        if transposed:
            parts = [_transposed(p, s) for p in parts]
        return np.stack(parts, -1).reshape(*parts[0].shape[:-1], -1)

    def shapes(sh: Shape, s: Sizes) -> list[Shape]:
        half = (*sh[:-2], sh[-1] // 2, sh[-2]) if transposed else (*sh[:-1], sh[-1] // 2)
        return [half, half]

    return Merged(roles, there, back, shapes)


def alternating_rows(*roles: str) -> Merged:
    """The even rows of each matrix for the first role, the odd ones for the second."""
    return Merged(
        roles,
        lambda a, s: [a.reshape(*a.shape[:-2], -1, 2, a.shape[-1])[..., i, :] for i in (0, 1)],
        lambda parts, s: np.stack(parts, -2).reshape(*parts[0].shape[:-2], -1, parts[0].shape[-1]),
        _halves_shapes,
    )


def _kv_b_shapes(shape: Shape, s: Sizes) -> list[Shape]:
    v = s.ints("attention.value_length_mla")
    return [(s.n_head, shape[1], shape[0] // s.n_head - v), (s.n_head, v, shape[1])]


def _kv_b_there(a: Array, s: Sizes) -> list[Array]:
    heads = a.reshape(s.n_head, -1, a.shape[1])
    nope = heads.shape[1] - s.ints("attention.value_length_mla")
    return [_swap(heads[:, :nope], 1, 2), heads[:, nope:]]


KV_B = Merged(  # makes K and V of a latent row. K's part is transposed, to make latent rows of Q
    ("attn_k_b", "attn_v_b"),
    _kv_b_there,
    lambda parts, s: np.concatenate((_transposed(parts[0], s), parts[1]), 1).reshape(-1, parts[1].shape[2]),
    _kv_b_shapes,
)
