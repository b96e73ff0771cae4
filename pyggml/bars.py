"""Progress bars of work that takes longer than a second, on stderr if that is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_PATIENCE = 1.0  # seconds before a bar appears
Show = Callable[..., None]  # (done, total, text beside the bar)


@contextmanager
def bar(what: str) -> Generator[Show]:
    """Give a function to call with the amount done, the total, and an optional text to show. The bar disappears at the
    end. `rich` is imported when the bar appears."""
    start, progress = time.monotonic(), list["Progress"]()
    is_terminal = sys.stderr is not None and sys.stderr.isatty()  # pyright: ignore[reportUnnecessaryComparison]

    def show(done: float, total: float, text: str = what) -> None:
        if not is_terminal or (not progress and time.monotonic() - start < _PATIENCE):
            return
        if not progress:
            progress.append(_started())
        shown = progress[0]
        if not shown.tasks:
            shown.add_task(what)
        shown.update(shown.task_ids[0], completed=done, total=total, description=text)

    try:
        yield show
    finally:
        for p in progress:
            p.stop()


def _started() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.start()
    return progress
