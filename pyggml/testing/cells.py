"""Which cells of op x types x layout x level the cases of this process have compared with the reference."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from ..opdef import OPS, OpDef, opdef_of
from ..tensor import Tensor

LAYOUTS = ("dense", "padded", "permuted")


class Cell(NamedTuple):
    """One way of computing an op. `types` names the types of its sources, then that of its result."""

    op: str
    types: tuple[str, ...]
    layout: str
    level: str


SEEN: set[Cell] = set()  # what `run_case` has compared


def layout_of(t: Tensor) -> str:
    """How a tensor lies in memory: dense, with gaps between its rows, or in another order."""
    if t.nb[0] != t.dtype.type_size or sorted(t.nb[1:]) != [*t.nb[1:]]:
        return "permuted"
    return "dense" if t.is_contiguous else "padded"


def see(node: Tensor, level: str) -> None:
    """Note that a node was compared at `level`. Its layout is the least regular one of its sources."""
    srcs = [s for s in node.src if s is not None]
    layout = max((layout_of(s) for s in srcs), key=LAYOUTS.index, default="dense")
    types = ("-" if s is None else s.dtype.name for s in node.src[: len(opdef_of(node).srcs)])
    SEEN.add(Cell(node.op, (*types, node.dtype.name), layout, level))


def _possible(op: OpDef, levels: Collection[str]) -> Iterator[Cell]:
    n = len(op.srcs)
    for row, result in op.dtypes.items():
        types = (*("-" if t is None else t.name for t in row[:n]), result.name)
        for layout in LAYOUTS if n else LAYOUTS[:1]:
            for level in levels:
                yield Cell(op.name, types, layout, level)


def table(seen: Collection[Cell], levels: dict[str, list[str]]) -> list[str]:
    """The lines of a table: for each op how many of the possible cells were compared, and in all.

    Possible are all rows of an op's types, in all layouts, on the `levels` that have a kernel of the op: more than the
    shape rules accept.
    """
    lines = [f"{'op':24}{'types':>11}{'layouts':>9}{'levels':>8}{'cells':>13}"]
    run = total = 0
    for name in sorted({cell.op for cell in seen} & OPS.keys()):
        own = {cell for cell in seen if cell.op == name}
        possible = {*_possible(OPS[name], levels.get(name, ["generic"]))}
        n_types = f"{len({c.types for c in own & possible})}/{len({c.types for c in possible})}"
        n_layouts, n_levels = len({c.layout for c in own}), len({c.level for c in own})
        lines.append(f"{name:24}{n_types:>11}{n_layouts:>9}{n_levels:>8}{f'{len(own & possible)}/{len(possible)}':>13}")
        run, total = run + len(own & possible), total + len(possible)
    return [*lines, f"cells compared with the reference: {run} of {total}"]
