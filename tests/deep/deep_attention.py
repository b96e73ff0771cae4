"""Attention of random shapes, types, masks and layouts, flash_attn_ext and the nodes of a transposed V, at every level
that this CPU has: within the bounds of the backend's tests of the float64 reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pyggml.backends.cpu import isa_levels
from pyggml.backends.cpu.isa import table_of
from pyggml.testing.harness import run_case
from pyggml.testing.strategies.attention import KEYS, TOKENS, flash_attn_cases

from ..backend.test_attention import attentions, check
from . import COUNT, SEED

MANY_KEYS = st.one_of(KEYS, st.integers(1, 700), st.sampled_from([1023, 1025, 3000, 4096]))
MANY_TOKENS = st.one_of(TOKENS, st.integers(1, 70))
THREADS = st.sampled_from([1, 2, 3, 5, 8])


def attack(name: str, cases: st.SearchStrategy[Any], run: Callable[[Any, int], None]) -> None:
    """`COUNT` different cases; a failing one is made smaller and shown."""
    seen: Counter[int] = Counter()

    @seed(SEED)
    @settings(
        max_examples=COUNT,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(cases, THREADS)
    def of_any_shape(case: Any, n_threads: int) -> None:
        seen[n_threads] += 1
        run(case, n_threads)

    try:
        of_any_shape()
    finally:
        print(f"\n{name}: {seen.total()} cases: " + ", ".join(f"{seen[n]} with {n} threads" for n in sorted(seen)))


@pytest.mark.parametrize("isa", isa_levels())
def test_flash(isa: str) -> None:
    attack(f"flash_attn_ext {isa}", flash_attn_cases(MANY_KEYS, MANY_TOKENS), lambda c, n: run_case(c, isa, n))


@pytest.mark.parametrize("isa", [i for i in isa_levels() if "attn_vt" in table_of(i)])
def test_transposed_v(isa: str) -> None:
    attack(f"transposed V {isa}", attentions(MANY_KEYS, MANY_TOKENS), lambda c, n: check(c, isa, n))
