"""A sample of models with hyperparameters that nobody chose; tests/deep/deep_models.py draws as many as one likes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyggml.models import PAGES

from . import others
from .archs import VARIANTS
from .varied import ALL, Changes, changes_of, check_varied, spec_of

VARIED = st.sampled_from(ALL or ["none"]).flatmap(lambda name: st.tuples(st.just(name), changes_of(name)))


@pytest.mark.skipif(not ALL, reason="no golden data")
def test_every_architecture_is_varied() -> None:
    """T5's decoder and Whisper are given a text or a sound besides (test_t5.py, test_hearing.py)."""
    assert set(PAGES) - others.ARCHS - {spec_of(name)["arch"] for name in VARIANTS} == {"t5", "whisper"}


@pytest.mark.skipif(not ALL, reason="no golden data")
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(VARIED)
def test_the_cpu_agrees_with_the_reference(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[str, Changes]
) -> None:
    check_varied(*drawn, tmp_path_factory.mktemp("varied"))
