"""Prints, at the end of the tests, which cells of op x types x layout x level were compared with the reference: a
line for each op in CI, else their sum. Processes of pytest-xdist send what they have compared."""

from __future__ import annotations

import os
from typing import Any

import pytest

from pyggml.opdef import OPS
from pyggml.testing import levels_of
from pyggml.testing.cells import SEEN, Cell, table


def pytest_sessionfinish(session: pytest.Session) -> None:
    sent: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if sent is not None:
        sent["cells"] = [(c.op, "/".join(c.types), c.layout, c.level) for c in SEEN]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    for op, types, layout, level in getattr(node, "workeroutput", {}).get("cells", ()):
        SEEN.add(Cell(op, tuple(types.split("/")), layout, level))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if SEEN:
        lines = table(SEEN, {op: levels_of(op) for op in OPS})
        terminalreporter.section("op x types x layout x level")
        for line in lines if os.environ.get("CI") else lines[-1:]:
            terminalreporter.write_line(line)
