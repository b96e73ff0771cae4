"""The sweep that borders between ways through a product are set by, and the borders themselves."""

from __future__ import annotations

import pytest
from pyggml.tools.measure import borders

from pyggml.backends.cpu import isa_levels
from pyggml.backends.cpu.products import FAST_BEYOND, ROUND_BEYOND
from pyggml.dtypes import DType


def test_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borders, "ROUNDS", 1)
    us = borders.us_by_columns(list(isa_levels())[-1], DType.Q4_0, (1, 3, 20), (64, 32))
    assert list(us) == [1, 3, 20] and all(0 <= t < float("inf") for t in us.values())


def test_falls() -> None:
    assert borders.falls({1: 10.0, 2: 10.4, 3: 10.6, 4: 5.0, 5: 10.0}) == {3: 1 - 10 / 10.6, 5: 0.5}


def test_floats_are_converted_beyond_a_border() -> None:
    assert "generic" not in ROUND_BEYOND and all(n > 8 for n in ROUND_BEYOND.values())
    assert "generic" not in FAST_BEYOND
