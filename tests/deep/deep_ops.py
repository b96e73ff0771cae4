"""An attack by graphs of any ops (`tests/backend/random_graphs.py`): PYGGML_DEEP of them, at all instruction sets, on
one to eight threads. Prints how often each op was computed."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pyggml.backends.cpu import isa_levels, lower
from pyggml.opdef import OPS
from pyggml.testing import STRATEGIES

from ..backend.random_graphs import Step, check_graph, steps
from . import COUNT, SEED

GROUP = 12  # ops that graphs are made of, in turn: drawn from all at once, some would be rare
EACH = 10  # graphs of a group


def test_graphs_of_any_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "_SHARE", -1.0)  # the smallest op is shared between threads
    seen, rng, names = Counter[str](), random.Random(SEED), list[str]()
    for i in range(max(COUNT // EACH, 1)):
        if len(names) < GROUP:
            names = rng.sample(sorted(STRATEGIES), len(STRATEGIES))
        ops, names = names[:GROUP], names[GROUP:]

        @settings(max_examples=EACH, deadline=None, phases=[Phase.generate, Phase.shrink], database=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @seed(SEED + i)
        @given(steps(ops, 8), st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]))
        def check(drawn: list[Step], n_threads: int) -> None:
            for isa in isa_levels():
                check_graph(drawn, isa, {1, n_threads}, seen)

        check()
    ops = {name: seen[name] for name in OPS if OPS[name].kernel is not None}
    print({name: n for name, n in seen.items() if name not in ops})
    print(sum(ops.values()), "nodes; the rarest ops:", sorted(ops.items(), key=lambda item: item[1])[:12])
