"""For every op, a hypothesis strategy that draws its cases: `STRATEGIES[op]`. A file for each family of ops."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from hypothesis import strategies as st

from ..harness import Case

STRATEGIES: dict[str, st.SearchStrategy[Case]] = {}
for _module in sorted(m.name for m in iter_modules(__path__)):
    STRATEGIES.update(import_module(f".{_module}", __name__).STRATEGIES)
