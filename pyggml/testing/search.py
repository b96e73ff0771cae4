"""The search for a case that fails: hypothesis, as all checks of this package use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.database import ExampleDatabase
from hypothesis.errors import FlakyFailure, Unsatisfiable

from ..errors import BackendError
from ..opdef import OpDef
from .draw import cases_of
from .harness import Case, Mismatch
from .strategies import STRATEGIES

Cases = st.SearchStrategy[Case]
_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example, HealthCheck.filter_too_much)


class _OfOneOp(ExampleDatabase):
    """The cases of one op that failed before. All checks are one function, for which hypothesis would keep one list."""

    def __init__(self, base: ExampleDatabase, op: str) -> None:
        super().__init__()
        self._base, self._op = base, op.encode()

    def save(self, key: bytes, value: bytes) -> None:
        self._base.save(key + self._op, value)

    def fetch(self, key: bytes) -> Iterable[bytes]:
        return self._base.fetch(key + self._op)

    def delete(self, key: bytes, value: bytes) -> None:
        self._base.delete(key + self._op, value)


def search(check: Callable[..., None], op: str, max_examples: int | None, *drawn: st.SearchStrategy[Any]) -> None:
    """Run `check` on drawn examples. The number of examples and whether they are the same each time follow from the
    profile of hypothesis in use."""
    profile = settings() if max_examples is None else settings(max_examples=max_examples)
    run = settings(
        profile,
        deadline=None,
        suppress_health_check=_SLOW,
        report_multiple_bugs=False,
        phases=[p for p in profile.phases if p is not Phase.explain],
        database=None if profile.database is None else _OfOneOp(profile.database, op),
    )
    check.__name__ = f"check_{op}"
    try:
        run(given(*drawn)(check))()
    except Unsatisfiable:
        raise BackendError(f"no case of {op} was accepted: give cases=cases_of(op, shapes=..., params=...)") from None
    except FlakyFailure as flaky:
        group: Any = flaky  # an ExceptionGroup, which Python 3.10 does not have
        found: Exception = group.exceptions[0]
        if not isinstance(found, Mismatch):
            raise found from None
        by_chance = "The same case did not fail when it was repeated, as when threads write the same memory."
        raise Mismatch(f"{found}\n  {by_chance}") from None


def cases_for(op: OpDef, cases: Cases | None) -> Cases:
    """The cases that are given, else those of the op's strategy, else those that follow from its definition."""
    return cases if cases is not None else STRATEGIES[op.name] if op.name in STRATEGIES else cases_of(op)
