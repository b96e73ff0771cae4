"""An attack by sizes at the edges of int64 (`tests/trust/edges.py`): PYGGML_DEEP cases of every op, at all instruction
sets. Prints how many cases were computed with other strides, how many with huge sizes were recorded or refused, and
the ops of which none was."""

from __future__ import annotations

from collections import Counter

from pyggml.opdef import OPS
from pyggml.testing import levels_of

from ..trust.edges import try_edges
from . import COUNT, SEED

HUGE = 8  # draws of huge sizes for each case


def test_every_op() -> None:
    seen = {name: try_edges(name, levels_of(name), COUNT, HUGE, SEED) for name in sorted(OPS)}
    for what in ("far", "recorded"):
        print(f"{what}: none of", [name for name, counts in seen.items() if not counts[what]])
    print(dict(sum(seen.values(), Counter[str]())))
