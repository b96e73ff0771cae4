"""Every op, on every instruction set this CPU has, against the float64 reference."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyggml.backends.cpu import isa_levels
from pyggml.backends.cpu.isa import table_of
from pyggml.opdef import OPS
from pyggml.testing.harness import Case, run_case
from pyggml.testing.strategies import STRATEGIES


def levels_of(op: str) -> list[str]:
    """The instruction sets that have a kernel of their own for this op (views have none: any will do)."""
    stem = OPS[op].kernel
    return [name for name in isa_levels() if stem in table_of(name)] or ["generic"]


@pytest.mark.parametrize(("op", "isa"), [(op, isa) for op in sorted(STRATEGIES) for isa in levels_of(op)])
def test_op_equals_reference(op: str, isa: str) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(STRATEGIES[op], st.sampled_from([1, 2]))
    def check(case: Case, n_threads: int) -> None:
        run_case(case, isa, n_threads)

    check()


@pytest.mark.parametrize("op", sorted(OPS))
def test_op_is_complete(op: str) -> None:
    """Reference, kernel, strategy, cost, label and public docstring: none may be missing."""
    import pyggml

    d = OPS[op]
    assert callable(d.ref) and callable(d.cost) and d.label
    assert op in STRATEGIES, f"no hypothesis strategy for {op}"
    public = getattr(pyggml, op, None) or getattr(pyggml, f"{op}_1d", None)
    assert public is not None and public.__doc__, f"pyggml.{op} is missing or undocumented"
