"""Fixtures of the backends' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pyggml.backends.cpu import lower


@pytest.fixture(scope="module", autouse=True)
def everything_is_shared() -> Iterator[None]:
    """Even the smallest op is shared between threads here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lower, "_SHARE", -1.0)
        yield
