"""A context in which one text follows another: what both begin with is evaluated once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from threading import Lock
from typing import TYPE_CHECKING

from ..loaded import LoadedModel
from .generation import Generation, OwnContext, TextRequest, in_own_context, until_end
from .prefixes import keep_prefix

if TYPE_CHECKING:
    from ..context import LlamaContext
    from .engine import Token


class KeptContext:
    """A context that stays when a text ends, and knows the tokens that it holds.

    `make` makes the context when it is needed first. `held` are the tokens that sequence 0 has evaluated.
    """

    def __init__(self, make: Callable[[], LlamaContext]) -> None:
        self._make = make
        self._ctx: LlamaContext | None = None
        self._held: list[int] = []
        self._last: weakref.ref[Generation] | None = None  # the text that is not at its end yet
        self._lock = Lock()

    @property
    def ctx(self) -> LlamaContext:
        """The context. It is made new when the model has got other adapters."""
        if self._ctx is None or self._ctx.loras != self._ctx.model.loras:
            if self._ctx is not None:
                self._ctx.close()
            self._ctx, self._held = self._make(), []
        return self._ctx

    @property
    def held(self) -> list[int]:
        """The tokens that are evaluated. Whoever evaluates more, or removes some, changes this list, too."""
        return self._held

    def clear(self) -> None:
        """Forget what is held."""
        self._held.clear()
        if self._ctx is not None:
            self._ctx.memory.clear()

    def start(self, text: TextRequest) -> Generation | None:
        """The generation of a text, for `run`; None when another text is under way. Raises what `TextRequest.start`
        raises."""
        with self._lock:
            if self._last is not None and self._last() is not None:
                return None
            g = text.start(self.ctx)
            self._last = weakref.ref(g)
            return g

    def run(self, g: Generation) -> Generator[Token]:
        """The tokens of a generation that `start` gave; to be run once. First, what is held is cut back to what the
        prompt begins with."""
        memory = self.ctx.memory
        n = keep_prefix(memory, 0, self._held, list(g.keys), g.media) if g.reuses and g.prompt else 0
        if n == 0:
            memory.clear()
        del self._held[n:]
        g.n_past = g.n_done = n
        try:
            yield from g
        finally:
            self._held[:] = [*g.keys, *g.ids][: g.n_done]
            self._last = None


def begin(
    model: LoadedModel, text: TextRequest, own: OwnContext, kept: KeptContext | None = None
) -> tuple[Generation, Iterator[Token]]:
    """The generation of a text, and its tokens: in the context that is kept, or in one of its own (with the options
    `own`) when another text is under way there, or the text needs more than one sequence. Raises what `Model.stream`
    raises."""
    g = None
    if kept is not None and not text.source and own.get("cfg_scale", 1) == 1:
        g = kept.start(text)
    if kept is None or g is None:
        g = in_own_context(model, text, **own)
        return g, until_end(g)
    return g, kept.run(g)
