"""Tests one's own ops, C kernels and backends by property. Cases are drawn at random, computed between guard bytes, and
compared with the float64 references. A case that fails is made as small as possible.

It needs hypothesis (`pip install pyggml[test]`). Importing it changes nothing elsewhere. `plugin` is for pytest.
"""

from __future__ import annotations

try:
    import hypothesis as _  # noqa: F401
except ModuleNotFoundError as e:
    if e.name != "hypothesis":
        raise
    raise ModuleNotFoundError(
        "pyggml.testing needs hypothesis: pip install 'pyggml[test]'", name="hypothesis"
    ) from None

from .check import check_backend, check_kernel, check_op, levels_of
from .draw import cases_of, ne_like, ne_of
from .gradients import check_gradient
from .harness import Case, Mismatch, Src, compare, gaussian, nmse, record_case, run_case, tolerance
from .strategies import STRATEGIES

__all__ = [
    "STRATEGIES",
    "Case",
    "Mismatch",
    "Src",
    "cases_of",
    "check_backend",
    "check_gradient",
    "check_kernel",
    "check_op",
    "compare",
    "gaussian",
    "levels_of",
    "ne_like",
    "ne_of",
    "nmse",
    "record_case",
    "run_case",
    "tolerance",
]
