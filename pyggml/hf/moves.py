"""How tensors of a checkpoint become those of a GGUF: each move is declared once, with its inverse.

A `Move` changes where elements lie, and works on arrays of any type: whatever a tensor is stored as, its bits stay. A
`Value` changes the elements, which are F32 then. A `Split` makes several tensors of one. All know the model's sizes by
its GGUF metadata alone, so that the way back knows them, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes that moves need; `il` is the layer."""

    n_head: int
    n_head_kv: int
    head_k: int
    head_v: int
    n_rot: int
    ints: Callable[[str], int]  # any other key of the architecture, `ssm.group_count`


Shape = tuple[int, ...]


def _same(shape: Shape, sizes: Sizes) -> Shape:
    return shape


@dataclass(frozen=True)
class Move:
    """`there(array, sizes)` has the elements as the GGUF has them, `back` as the checkpoint has; `shape` says of which
    shape the GGUF's tensor is, before anything is read."""

    there: Callable[[Array, Sizes], Array]
    back: Callable[[Array, Sizes], Array]
    shape: Callable[[Shape, Sizes], Shape] = _same


@dataclass(frozen=True)
class Value:
    """`there(array)` has the values of the GGUF, `back` those of the checkpoint; both F32."""

    there: Callable[[Array], Array]
    back: Callable[[Array], Array]


@dataclass(frozen=True)
class Split:
    """One tensor of the checkpoint becomes those of the `roles`: `there(array, sizes)` gives them in that order, `back`
    puts them together again."""

    roles: tuple[str, ...]
    there: Callable[[Array, Sizes], list[Array]]
    back: Callable[[list[Array], Sizes], Array]
    shapes: Callable[[Shape, Sizes], list[Shape]]


def then(*moves: Move) -> Move:
    """One after the other."""

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
    """Checkpoints rope elements of a head together that are half of it apart; `norm` ropes want them side by side."""

    def turn(a: Array, s: Sizes, there: bool) -> Array:
        heads = a.reshape(n_heads(s), -1, *a.shape[1:])
        rot = min(s.n_rot, heads.shape[1])  # the rest of a head is not roped
        grid = (2, rot // 2) if there else (rot // 2, 2)
        turned = _swap(heads[:, :rot].reshape(len(heads), *grid, *a.shape[1:]), 1, 2)
        turned = turned.reshape(len(heads), rot, *a.shape[1:])
        return np.concatenate((turned, heads[:, rot:]), 1).reshape(a.shape)

    return Move(lambda a, s: turn(a, s, True), lambda a, s: turn(a, s, False))


ROPE_Q, ROPE_K = _pairs(lambda s: s.n_head), _pairs(lambda s: s.n_head_kv)
ROPE_PAIRS = {"attn_q": ROPE_Q, "attn_k": ROPE_K}

# -- values ---------------------------------------------------------------------------------------------------------

PLUS_ONE = Value(lambda a: a + np.float32(1), lambda a: a - np.float32(1))
A_LOG = Value(lambda a: -np.exp(a), lambda a: np.log(-a))

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
    """A vector as a row for each of the groups that the key counts."""
    return Move(
        lambda a, s: a.reshape(s.ints(key), -1),
        lambda a, s: a.reshape(-1),
        lambda sh, s: (s.ints(key), sh[0] // s.ints(key)),
    )


def by_kind(group: Callable[[Sizes], tuple[int, int, int]]) -> Move:
    """Q, K and V of one weight that stand together per group of heads: `group` gives the number of groups, the heads of
    Q in each, and those of K (as many of V). In the GGUF all of Q stand before all of K, and those before all of V."""

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


def halves(*roles: str) -> Split:
    """The first half of the rows (of each matrix) for one, the second for the other."""
    return Split(
        roles,
        lambda a, s: np.split(a, 2, -2),
        lambda parts, s: np.concatenate(parts, -2),
        _halves_shapes,
    )


def halves_transposed(*roles: str) -> Split:
    """So, of matrices that are stored [inputs, outputs]."""
    return Split(
        roles,
        lambda a, s: [_transposed(p, s) for p in np.split(a, 2, -1)],
        lambda parts, s: np.concatenate([_transposed(p, s) for p in parts], -1),
        lambda sh, s: _halves_shapes((*sh[:-2], sh[-1], sh[-2]), s),
    )


def alternating(*roles: str, transposed: bool) -> Split:
    """Every other output for one, those between for the other; `transposed`: of matrices [inputs, outputs]."""

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

    return Split(roles, there, back, shapes)


def alternating_rows(*roles: str) -> Split:
    """Every other row of each matrix for one, those between for the other."""
    return Split(
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


KV_B = Split(  # what makes K and V of a latent row: with K's transposed it makes latent rows of Q
    ("attn_k_b", "attn_v_b"),
    _kv_b_there,
    lambda parts, s: np.concatenate((_transposed(parts[0], s), parts[1]), 1).reshape(-1, parts[1].shape[2]),
    _kv_b_shapes,
)
