"""Every op, on every instruction set this CPU has, against the float64 reference."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import strategies as st

from pyggml.opdef import OPS
from pyggml.testing import STRATEGIES, Case, check_op, levels_of, record_case
from pyggml.testing.harness import compiled, outcomes
from pyggml.testing.search import search

# The reference is computed once for all levels. Names of tests have those of the levels: tests/emulate.sh chooses them.
ON_ALL_LEVELS = [
    pytest.param(op, levels, id=f"{op}-{'-'.join(levels)}") for op in sorted(STRATEGIES) if (levels := levels_of(op))
]


@pytest.mark.parametrize(("op", "levels"), ON_ALL_LEVELS)
def test_op_equals_reference(op: str, levels: list[str]) -> None:
    check_op(OPS[op], isa=levels, max_examples=25)


@pytest.mark.parametrize("op", sorted(STRATEGIES))
def test_threads_do_not_change_a_bit(op: str) -> None:
    def check(case: Case, isa: str, n_threads: int) -> None:
        programs = [partial(compiled, isa=isa, n_threads=n) for n in (1, n_threads)]
        (alone, _), (shared, _) = outcomes(record_case(case), programs)
        assert alone[1] == shared[1]

    search(check, op, 8, STRATEGIES[op], st.sampled_from(levels_of(op)), st.integers(2, 8))


@pytest.mark.parametrize("op", sorted(OPS))
def test_op_is_complete(op: str) -> None:
    """Reference, kernel, strategy, cost, label and public docstring: none may be missing."""
    import pyggml

    d = OPS[op]
    assert callable(d.ref) and callable(d.cost) and d.label
    assert op in STRATEGIES, f"no hypothesis strategy for {op}"
    public = getattr(pyggml, op, None) or getattr(pyggml, f"{op}_1d", None)
    assert public is not None and public.__doc__, f"pyggml.{op} is missing or undocumented"
