"""Look into graphs: drawings, recorded runs, traces, taps and edits.

The room can be called: `gg.inspect(graph, "page.html")` is `pyggml.inspect.page.inspect`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> None:
        """Write the page of a run, see `pyggml.inspect.page.inspect`."""
        from .page import inspect  # imported when it is called: who builds graphs does not wait for it

        inspect(*args, **options)


sys.modules[__name__].__class__ = _Room
