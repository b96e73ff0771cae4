"""An attack by hyperparameters: every architecture, PYGGML_DEEP times with others drawn, on the CPU
and on the reference. Prints how many hyperparameters were refused, and how many models agreed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from ..models.varied import ALL, Changes, changes_of, check_varied
from . import COUNT, SEED


@pytest.mark.parametrize("name", ALL)
def test_varied(name: str, tmp_path: Path) -> None:
    counts: Counter[str] = Counter()

    @settings(max_examples=COUNT, deadline=None, phases=[Phase.generate, Phase.shrink], database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @seed(SEED)
    @given(changes_of(name))
    def check(changes: Changes) -> None:
        counts["agreed" if check_varied(name, changes, tmp_path) else "refused"] += 1

    check()
    print(name, dict(counts))
