"""The exceptions pyggml raises where ggml would abort the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from operator import index
from types import FrameType
from typing import Any

import numpy as np

Site = tuple[str, int]  # file and line of the user's call


class GGMLError(Exception):
    """Base of every error pyggml raises on bad input."""


class ShapeError(GGMLError):
    """The shapes or strides of an op's tensors break its rule."""


class DTypeError(GGMLError):
    """An op, a conversion or a backend does not know these data types."""


class GraphError(GGMLError):
    """A graph is malformed: a cycle, a foreign tensor, a missing input, too many nodes."""


class AllocError(GGMLError):
    """Memory could not be planned or obtained, or a tensor has none."""


class BackendError(GGMLError):
    """A backend cannot do what was asked, or a kernel refused its data."""


class Aborted(BackendError):
    """A graph was broken off before its end: by Ctrl-C, or by another thread (`Program.abort`)."""


class GGUFError(GGMLError):
    """A GGUF file is truncated, lies about itself, or is of an unknown kind."""


class BatchError(GGMLError):
    """A batch holds what the model or the context cannot take."""


class KVCacheFull(GGMLError):
    """No room for the batch in the KV cache: `needed` cells, `free` ones. The cache is as it was before the call."""

    def __init__(self, text: str, needed: int = 0, free: int = 0) -> None:
        super().__init__(text)
        self.needed, self.free = needed, free


class StateError(GGMLError):
    """A saved state is truncated, damaged, newer, or of another model; nothing was loaded."""


class ModelError(GGMLError):
    """A model cannot be used: its file lacks something that the architecture needs, or the architecture is unknown."""


class ClosedError(ModelError):
    """A model or a context is used after `close()`."""


class MediaError(GGMLError):
    """A picture or a sound cannot be read, is too large, or does not suit the checkpoint's processor."""


class SamplerError(GGMLError):
    """A sampler's parameter is out of its range, a grammar cannot be read, or no token is left to choose."""


class OptionError(GGMLError, TypeError):
    """A keyword argument that there is not, or one that is given under two names."""


def not_sent(what: object, instead: str, error: type[GGMLError] = GraphError) -> GGMLError:
    """The error of an object that cannot be pickled, with what to do instead. (`copy` copies as `pickle` does.)"""
    return error(f"a {type(what).__name__} cannot be pickled or copied: {instead}")


def integer(value: Any) -> int:
    """operator.index, for which np.True_ is 1 before NumPy 2.3. Raises TypeError; Varies for a `Size`."""
    if type(value) is int:
        return value
    if isinstance(value, np.bool_):
        raise TypeError(f"{value!r} is no integer")
    return index(value)


def whole(
    what: str, value: Any, low: int | None = None, high: int | None = None, error: type[GGMLError] = GGMLError
) -> int:
    """`value` as an int. Raises `error` when it is not a whole number from `low` to `high`."""
    try:
        n = value if type(value) is int else integer(value)
        above = high is not None and n > high
        if not above and (low is None or n >= low):
            return n
    except (TypeError, GGMLError):  # it is a Size
        above = False
    rule = ("a whole number" if low is None else f"a whole number from {low}") + f" to {high}" * above
    raise error(f"{what} must be {rule}, not {value!r:.40}")


def path_name(path: Any, error: type[GGMLError]) -> str:
    """A path as text. Raises `error` when `path` is not a path (Python would take a number for an open file)."""
    try:
        name = os.fsdecode(path)
    except TypeError:
        name = "\0"
    if not name or "\0" in name:
        raise error(f"a path cannot be {path!r:.60}")
    return name


def nearest(name: str, known: Iterable[str], n: int = 3, cutoff: float = 0.6) -> list[str]:
    """At most `n` of the known names that look like `name`, the likest first."""
    from difflib import get_close_matches  # only an error needs it

    return get_close_matches(name, list(known), n, cutoff)


def one_of(what: str, value: object, known: Iterable[str], error: type[GGMLError]) -> None:
    """Raise `error`, with all that is known and the likest of it, when `value` is not one of the known texts."""
    names = [*known]
    if not isinstance(value, str) or value not in names:  # an array would compare its elements
        like = nearest(value, names, 1) if isinstance(value, str) else []
        meant = f" (is {like[0]!r} meant?)" if like else ""
        raise error(f"{what} must be one of {', '.join(names)}, not {value!r:.40}{meant}")


_site: ContextVar[Site | None] = ContextVar("pyggml_site", default=None)


class OneSite:
    """A `with` block in which every recorded node gets the site of the call that entered the block: all nodes of a
    model's graph belong to one call of the user."""

    def __enter__(self) -> None:
        self._token = _site.set(user_site())

    def __exit__(self, *exc: object) -> None:
        _site.reset(self._token)


def in_pyggml(frame: FrameType) -> bool:
    """Whether a frame is of code of pyggml."""
    module = frame.f_globals.get("__name__", "")
    return module == "pyggml" or module.startswith("pyggml.")


def user_site() -> Site:
    """File and line of the nearest caller outside pyggml (or of the outermost frame)."""
    if (site := _site.get()) is not None:
        return site
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    last = frame
    while frame is not None:
        last = frame
        if not in_pyggml(frame):
            break
        frame = frame.f_back
    assert last is not None
    return last.f_code.co_filename, last.f_lineno


def at_line(site: Site | None) -> str:
    """For messages: " at FILE:LINE", the user's line; "" when it is not known."""
    return "" if site is None else f" at {site[0]}:{site[1]}"


def explain(op: str, rule: str, tensors: Sequence[tuple[str, str]], site: Site | None) -> str:
    """The message of an error about an op: its rule, its tensors (role, description), the user's line."""
    lines = [f"{op}: {rule}"]
    lines += [f"  {role} = {text}" for role, text in tensors]
    if site is not None:
        lines.append(f" {at_line(site)}")
    return "\n".join(lines)
