"""What tests need of Pillow."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest


def _older() -> bool:
    try:
        return int(version("pillow").split(".")[0]) < 13
    except PackageNotFoundError:
        return False


of_pillow_13 = pytest.mark.skipif(_older(), reason="Pillow below 13 resizes long pictures by other roundings")
