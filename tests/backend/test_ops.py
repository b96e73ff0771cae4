"""Every op, on every instruction set this CPU has, against the float64 reference."""

from __future__ import annotations

import pytest

from pyggml.opdef import OPS
from pyggml.testing import STRATEGIES, check_op, levels_of

# The reference is computed once for all levels. Names of tests have those of the levels: tests/emulate.sh chooses them.
ON_ALL_LEVELS = [
    pytest.param(op, levels, id=f"{op}-{'-'.join(levels)}") for op in sorted(STRATEGIES) if (levels := levels_of(op))
]


@pytest.mark.parametrize(("op", "levels"), ON_ALL_LEVELS)
def test_op_equals_reference(op: str, levels: list[str]) -> None:
    check_op(OPS[op], isa=levels, max_examples=25)


@pytest.mark.parametrize("op", sorted(OPS))
def test_op_is_complete(op: str) -> None:
    """Reference, kernel, strategy, cost, label and public docstring: none may be missing."""
    import pyggml

    d = OPS[op]
    assert callable(d.ref) and callable(d.cost) and d.label
    assert op in STRATEGIES, f"no hypothesis strategy for {op}"
    public = getattr(pyggml, op, None) or getattr(pyggml, f"{op}_1d", None)
    assert public is not None and public.__doc__, f"pyggml.{op} is missing or undocumented"
