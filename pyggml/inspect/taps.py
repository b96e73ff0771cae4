"""Taps and edits: read and change tensors of running graphs by name.

Names are those of the graph (`pyggml dump-dot` shows them): `l_out-3`, `kq_soft_max_ext-0`, `result_norm`. Patterns are
the shell's (`l_out-*`). When several nodes of a graph have one name, the last one is meant. A watched node is not fused
away; everything else is computed as usual. Flash attention has no node for the scores, and lays `v` and `kqv`
out in another way, so a layer in which one of these is watched computes attention without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from pyggml.codec import Array, as_array, unfit
from pyggml.errors import DTypeError, GGMLError, GraphError, ShapeError, nearest, user_site
from pyggml.inspect.watch import Watches
from pyggml.tensor import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

Callback = Callable[[str, Array], object]
Change = Callable[[Array], Any]


class _Watching:
    """What taps and edits share: the patterns, and that they are in force within a `with` block."""

    def __init__(self, watches: Watches, patterns: tuple[str, ...]) -> None:
        if isinstance(patterns, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"taps and edits take a tuple of names: ({patterns!r:.80},), not {patterns!r:.80}")
        if not patterns or not all(isinstance(p, str) and p for p in patterns):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError(f"taps and edits take names of nodes, or patterns such as 'l_out-*', not {patterns!r:.80}")
        self._watches, self.patterns = watches, patterns

    def asks(self, name: str, last: bool = True) -> bool:
        """See `Watcher.asks`."""
        return last and any(fnmatchcase(name, p) for p in self.patterns)

    def chosen(self, nodes: Sequence[Tensor]) -> Collection[Tensor]:
        """See `Watcher.chosen`."""
        return ()

    def __enter__(self) -> Self:
        self._watches.remove(self)
        self._watches.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watches.remove(self)

    def deliver(self, t: Tensor) -> None:
        """See `Watcher.deliver`."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {' '.join(self.patterns)}>"


class Tap(_Watching, Mapping[str, list[Array]]):
    """Collects the values of nodes as they are computed: name -> a list of arrays, one for each run, oldest first.

    A decode makes one run for each n_ubatch tokens. Arrays are copies in NumPy order: `l_out-3` is (n_tokens, n_embd),
    `kq_soft_max_ext-3` is (n_head, rows, n_kv); when a graph pads rows, rows beyond the tokens are meaningless. The
    values stay after the `with` block; `clear()` forgets them. A callback may use other contexts, and may read the
    context it looks into; changing that one raises GraphError. An error in the callback raises GraphError with the name
    of the node.
    """

    def __init__(self, watches: Watches, patterns: tuple[str, ...], callback: Callback | None = None) -> None:
        super().__init__(watches, patterns)
        self._callback = callback
        self._arrays: dict[str, list[Array]] = {}

    def deliver(self, t: Tensor) -> None:
        """See `Watcher.deliver`."""
        values = _values(t)
        if self._callback is None:
            self._arrays.setdefault(t.name, []).append(np.array(values, order="C"))
        else:
            values = np.ascontiguousarray(values)
            values.flags.writeable = False
            with _named("tap", t):
                self._callback(t.name, values)

    def clear(self) -> None:
        """Forget the values collected so far."""
        self._arrays.clear()

    def __getitem__(self, name: str) -> list[Array]:
        if name not in self._arrays:
            near = ", ".join(nearest(name, self._arrays, 3, 0.3)) or "none"
            raise KeyError(
                f"no node {name!r} has been computed under {self!r}; of the {len(self)} that have, near: {near}"
            )
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class Edit(_Watching):
    """Changes nodes before anything reads them. `n` counts the changes.

    The function gets an array as a tap does: a copy, which it may write into, directly or through a view. The array's
    contents are then stored in the node; if the function returns an array, that one is stored instead. An error in the
    function raises GraphError with the name of the node. A function that returns nothing and has changed nothing causes
    one RuntimeWarning; to leave a node unchanged on purpose, return the array. So does an edit of a name that no node
    of the graphs had.
    """

    def __init__(self, watches: Watches, patterns: tuple[str, ...], change: Change) -> None:
        super().__init__(watches, patterns)
        if not callable(change):
            raise GraphError(f"an edit takes a function of the array, not {change!r:.60}")
        self._change, self.n, self._warned = change, 0, False
        self._names: set[str] = set()  # of the nodes of graphs that were planned in the `with` block

    def asks(self, name: str, last: bool = True) -> bool:
        """See `Watcher.asks`."""
        self._names.add(name)
        return super().asks(name, last)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        if kind is None and self._names and not any(fnmatchcase(n, p) for n in self._names for p in self.patterns):
            near = ", ".join(nearest(self.patterns[0], self._names, 3, 0.3)) or "none"
            text = f"the edit of {' '.join(self.patterns)} changed nothing: no node is called so; near: {near}"
            warnings.warn_explicit(text, RuntimeWarning, *user_site())

    def deliver(self, t: Tensor) -> None:
        """See `Watcher.deliver`."""
        memory = _values(t)
        values = np.array(memory, order="C")
        with _named("edit", t):
            result = self._change(values)
        self.n += 1
        if result is None and not self._warned and values.tobytes() == memory.tobytes():
            self._warn(t)
        changed = values if result is None else as_array("edit", result)
        why = unfit(changed, t.dtype)
        if why is not None:
            raise DTypeError(f"the edit of {t.describe()}: {why} cannot be stored in it")
        if changed.shape != memory.shape:  # not of t.shape, where sizes follow a Var
            raise ShapeError(f"the edit of {t.describe()} gave shape {changed.shape}, not {memory.shape}")
        t.store(changed.reshape(t.layout[0][::-1]))

    def _warn(self, t: Tensor) -> None:
        self._warned = True
        text = "changed nothing and returned None: write into the array (x[...] = ...), or return another of its shape"
        warnings.warn_explicit(f"the edit of {t.describe()} {text}", RuntimeWarning, *user_site())


@contextmanager
def _named(kind: str, t: Tensor) -> Generator[None]:
    """Say at which node the user's function failed: pyggml's errors keep their class, others become a GraphError."""
    try:
        yield
    except Exception as e:
        where = f"the {kind} of {t.describe()}, op {t.op}: "
        if not isinstance(e, GGMLError):
            raise GraphError(f"{where}{type(e).__name__}: {e}") from e
        named = type(e)(f"{where}{e}")
        named.__dict__.update(e.__dict__)
        raise named from e


def _values(t: Tensor) -> Array:
    """The present values of `t` in NumPy order: its memory, if NumPy has the type. The plan may recycle it later."""
    return t.elements()[(*(0,) * (4 - t.rank), ...)]
