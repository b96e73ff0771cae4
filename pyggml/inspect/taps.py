"""Taps and edits: tensors of running graphs, read and changed by name.

Names are those of the graph (`pyggml dump-dot` shows them): `l_out-3`, `kq_soft_max_ext-0`, `result_norm`; patterns are
the shell's (`l_out-*`). Of several nodes of one name in a graph, the last is meant. What is watched is not fused away;
all else is computed as ever. With flash attention, layers whose scores (or `v` or `kqv`, which lie otherwise there) are
watched attend without it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from pyggml.codec import Array, as_array, unfit
from pyggml.errors import DTypeError, GGMLError, GraphError, ShapeError, user_site
from pyggml.inspect.watch import Watches
from pyggml.tensor import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

Callback = Callable[[str, Array], object]
Change = Callable[[Array], Any]


class _Watching:
    """What taps and edits share: patterns, and being in force within a `with` block."""

    def __init__(self, watches: Watches, patterns: tuple[str, ...]) -> None:
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
    """Values of nodes, as they are computed: name -> the arrays of the runs since, oldest first.

    A decode is a run for each n_ubatch tokens. Arrays are copies in NumPy order: `l_out-3` (n_tokens, n_embd),
    `kq_soft_max_ext-3` (n_head, rows, n_kv); where a graph pads rows, those beyond the tokens mean nothing. They stay
    readable after the `with` block; `clear()` forgets them. A callback may use other contexts, and read the one it
    looks into; what would change that raises GraphError. So does an error of the callback, with the name of the node.
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
        """Forget what has come so far."""
        self._arrays.clear()

    def __getitem__(self, name: str) -> list[Array]:
        if name not in self._arrays:
            near = ", ".join(get_close_matches(name, self._arrays, 3, 0.3)) or "none"
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
    """Changes nodes before anything reads them. `n` counts how often.

    The function gets an array as a tap's, a copy that it may write into, also through a view of it: what the array then
    holds is stored in the node. An array that it returns is stored instead. An error in it raises GraphError with the
    name of the node. A function that returns nothing and has changed nothing gets one RuntimeWarning; where that is
    meant, it returns the array.
    """

    def __init__(self, watches: Watches, patterns: tuple[str, ...], change: Change) -> None:
        super().__init__(watches, patterns)
        if not callable(change):
            raise GraphError(f"an edit takes a function of the array, not {change!r:.60}")
        self._change, self.n, self._warned = change, 0, False

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
        if changed.shape != t.shape:
            raise ShapeError(f"the edit of {t.describe()} gave shape {changed.shape}, not {t.shape}")
        t.store(changed.reshape(t.ne[::-1]))

    def _warn(self, t: Tensor) -> None:
        self._warned = True
        text = "changed nothing and returned None: write into the array (x[...] = ...), or return another of its shape"
        warnings.warn_explicit(f"the edit of {t.describe()} {text}", RuntimeWarning, *user_site())


@contextmanager
def _named(kind: str, t: Tensor) -> Generator[None]:
    """What a function of the user raises, with the name of the node; pyggml's own errors are passed on."""
    try:
        yield
    except GGMLError:
        raise
    except Exception as e:
        raise GraphError(f"the {kind} of {t.describe()}: {type(e).__name__}: {e}") from e


def _values(t: Tensor) -> Array:
    """What `t` holds now, in NumPy order: its memory itself where NumPy has the type. The plan may recycle it later."""
    return t.elements()[(0,) * (4 - t.rank)]
