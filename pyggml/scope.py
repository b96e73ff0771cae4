"""Scopes: `with gg.scope("layer 3"):` begins the names of what is made inside with `layer 3/`."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar

from .errors import GraphError

_prefix: ContextVar[str] = ContextVar("pyggml_scope", default="")  # threads and tasks have each their own
prefix = _prefix.get  # what names begin with now: "" or `layer 3/`


class scope(ContextDecorator):
    """A `with` block in which the names of tensors begin with `name/`: those that `set_name` and `name=` give, and
    those that a graph gives to tensors without one (`layer 3/node_17`). Scopes inside scopes are joined with slashes.
    It can be entered again, and be put before a function: `@gg.scope("attention")`.

    Drawings show a scope as a box. Scopes that count, such as `layer 0`, `layer 1`, fold as the layers of a model do;
    profiles and the inspector's page take them for layers, and a tap for `layer 3/*` sees all that is inside. Raises
    GraphError for a name that is no text, or empty.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not all(name.split("/")):  # pyright: ignore[reportUnnecessaryIsInstance]
            text = f"a scope needs a name such as 'layer 3', or several with a slash between, not {name!r:.60}"
            raise GraphError(text)
        self._part = f"{name}/"

    def __enter__(self) -> None:
        _prefix.set(prefix() + self._part)

    def __exit__(self, *error: object) -> None:
        _prefix.set(prefix().removesuffix(self._part))


@contextmanager
def no_scope() -> Generator[None]:
    """A `with` block in which names are as they are given, whatever scopes are open around it."""
    before = prefix()
    _prefix.set("")
    try:
        yield
    finally:
        _prefix.set(before)


def named(name: str, own: str) -> str:
    """The name of a tensor: `name`, completed by `own` when nobody has given it one."""
    return name if name and name[-1] != "/" else name + own


def given(name: str, own: str) -> str:
    """The name of a tensor as it was before `named` completed it with `own`."""
    before = name.removesuffix(own)
    return before if not before or before[-1] == "/" else name


def scopes_of(name: str) -> tuple[str, ...]:
    """The scopes in which a tensor of this name was made, the outermost first: `layer 3`, `attention`."""
    return tuple(name.split("/")[:-1])


def common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The scopes with which all of these begin."""
    n = min(map(len, paths))
    while any(path[:n] != paths[0][:n] for path in paths):
        n -= 1
    return paths[0][:n]
