"""Every op, on every instruction set this CPU has, against the float64 reference."""

from __future__ import annotations

import pytest

from pyggml.opdef import OPS
from pyggml.testing import STRATEGIES, check_op, levels_of


@pytest.mark.parametrize(("op", "isa"), [(op, isa) for op in sorted(STRATEGIES) for isa in levels_of(op)])
def test_op_equals_reference(op: str, isa: str) -> None:
    check_op(OPS[op], isa=isa, max_examples=25)


@pytest.mark.parametrize("op", sorted(OPS))
def test_op_is_complete(op: str) -> None:
    """Reference, kernel, strategy, cost, label and public docstring: none may be missing."""
    import pyggml

    d = OPS[op]
    assert callable(d.ref) and callable(d.cost) and d.label
    assert op in STRATEGIES, f"no hypothesis strategy for {op}"
    public = getattr(pyggml, op, None) or getattr(pyggml, f"{op}_1d", None)
    assert public is not None and public.__doc__, f"pyggml.{op} is missing or undocumented"
