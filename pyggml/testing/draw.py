"""Cases of an op that follow from its definition: types, shapes, layouts, values and parameters are drawn.

pyggml's own ops have strategies that know more of them (`strategies/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from ..codec import Array
from ..dtypes import DType
from ..errors import DTypeError, ShapeError
from ..opdef import OpDef, record
from ..tensor import Tensor
from .harness import Case, Src, Values, gaussian, record_case, tolerance

Ne = tuple[int, ...]
Number = bool | int | float | str
FLOATS = (DType.F64, DType.F32, DType.F16, DType.BF16)
SPECIAL = ([np.nan], [np.inf], [-np.inf], [np.nan, np.inf, -np.inf])
LAYOUTS = [(None, 0), (None, 3), ((0, 2, 1, 3), 0), ((1, 0, 2, 3), 0), ((3, 1, 2, 0), 0)]  # (permute, pad)
ROWS_STAY = [(None, 0), (None, 1), ((0, 2, 1, 3), 0)]  # for block types; the pad in blocks


def small_integers(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """From -100 to 100."""
    return rng.integers(-100, 101, shape)


def planted(spec: Src | None, special: Sequence[float], one_of: int) -> Src | None:
    """A float source with some special values: one of `one_of` elements, at least one. Other sources stay."""
    if spec is None or spec.dtype not in FLOATS:
        return spec
    before: Values = spec.values or gaussian

    def values(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        x = np.array(before(rng, shape), np.float64)
        n = int(rng.choice([1, 1 + x.size // one_of]))
        x.flat[rng.integers(0, x.size, n)] = rng.choice(np.array(special), n)
        return x

    return replace(spec, values=values)


@st.composite
def ne_of(draw: st.DrawFn, block: int = 1) -> Ne:
    """The ne of a tensor whose rows are whole blocks. Rows are short, or around the borders of vectors."""
    n0 = draw(st.integers(1, 76 if block == 1 else 8))  # one range: a long row can be made a short one
    return (n0 * block if n0 <= 70 else n0 + 184, *(draw(st.integers(1, 3)) for _ in range(3)))


@st.composite
def ne_like(draw: st.DrawFn, ne: Ne) -> Ne:
    """`ne` itself, or with some dimensions of 1: what broadcasts."""
    ones = draw(st.just(()) | st.sets(st.integers(0, 3)).map(tuple))
    return tuple(1 if i in ones else n for i, n in enumerate(ne))


def _parameter(op: OpDef, name: str) -> st.SearchStrategy[Number]:
    if name in op.enums:
        return st.sampled_from([int(m) for m in op.enums[name]])
    return st.integers(-2, 4) | st.floats(-4, 4, width=32)


def _accepts(op: OpDef, case: Case) -> bool:
    try:
        record_case(replace(case, srcs=tuple(s and replace(s, values=_zeros) for s in case.srcs)))
    except (ShapeError, DTypeError):
        return False
    return True


def _zeros(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.zeros(shape)


@st.composite
def cases_of(
    draw: st.DrawFn,
    op: OpDef,
    *,
    shapes: st.SearchStrategy[tuple[Ne, ...]] | None = None,
    params: Mapping[str, st.SearchStrategy[Any]] | None = None,
    values: Sequence[Values | None] | None = None,
    types: tuple[DType | None, ...] | None = None,
    nmse: float | None = None,
    roundings: float = 4.0,
    special: bool = True,
) -> Case:
    """Draws cases of one's own op: those that its definition allows and its shape rule accepts.

    shapes     draws the ne of all sources; default: all have one shape, or later sources have some dimensions of 1
    params     strategies of parameters by name; default: small numbers, members of an enumeration
    values     for each source (rng, 4-d NumPy shape) -> values; default: normal values with outliers, small integers
    types      a row of `op.dtypes`; default: any
    nmse       the largest normalised squared error; default: `tolerance` of the result's type and of `roundings`
    special    whether float sources hold NaN and infinities in some cases
    """
    row = types or draw(st.sampled_from(list(op.dtypes)))
    n = len(op.srcs)
    block = max((t.block_size for t in row if t is not None), default=1)
    if shapes is not None:
        nes = draw(shapes)
    else:
        first = draw(ne_of(block))
        nes = (first, *(draw(ne_like(first)) for _ in range(n - 1)))
    plant = draw(st.none() | st.sampled_from(SPECIAL)) if special else None
    srcs: list[Src | None] = []
    for i, t in enumerate(row[:n]):
        if t is None:
            srcs.append(None)
            continue
        permute, pad = draw(st.sampled_from(LAYOUTS if t.block_size == 1 else ROWS_STAY))
        chosen = None if values is None else values[i]
        default = gaussian if t in FLOATS or t.is_quantized else small_integers
        src = Src(t, nes[i], permute, pad * t.block_size, chosen or default)
        srcs.append(src if plant is None else planted(src, plant, 7))
    given = {name: draw((params or {}).get(name) or _parameter(op, name)) for name in op.params}
    asked = row[-1] if len(row) > n else None
    over = draw(st.sampled_from([None, *op.inplace]))

    def build(*tensors: Tensor | None) -> Tensor:
        return record(op, tensors, given, dtype=asked, inplace=over)

    limit = tolerance(op.dtypes[row], roundings) if nmse is None else nmse
    case = Case(tuple(srcs), build, limit, draw(st.integers(0, 99)))
    if not _accepts(op, case):  # then simpler: sources of one shape, no view
        over = None
        if shapes is None:
            case = replace(case, srcs=tuple(s and replace(s, ne=nes[0]) for s in srcs))
        assume(_accepts(op, case))
    return case
