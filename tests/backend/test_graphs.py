"""A sample of graphs of any ops; tests/deep/deep_ops.py draws as many as one likes."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyggml.backends.cpu import isa_levels

from .random_graphs import Step, check_graph, steps


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps(), st.sampled_from(list(isa_levels())), st.sampled_from([1, 2, 3, 8]))
def test_graphs_of_any_ops(drawn: list[Step], isa: str, n_threads: int) -> None:
    check_graph(drawn, isa, (n_threads,), Counter())
