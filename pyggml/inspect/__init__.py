"""Look into graphs: drawings, recorded runs, traces, taps and edits.

The room can be called: `gg.inspect(graph, "page.html")` is `pyggml.inspect.page.inspect`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from os import PathLike
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyggml.graph import Graph
    from pyggml.tensor import Tensor

    from .record import Run


class _Room(ModuleType):
    def __call__(
        self,
        graph: Graph | Run,
        path: str | PathLike[str],
        inputs: Mapping[Tensor | str, Any] | None = None,
        n_threads: int | None = None,
        backends: Sequence[str] = ("cpu",),
    ) -> None:
        """Write the page of a run, see `pyggml.inspect.page.inspect`."""
        from .page import inspect  # imported when it is called: who builds graphs does not wait for it

        inspect(graph, path, inputs, n_threads, backends)


sys.modules[__name__].__class__ = _Room
