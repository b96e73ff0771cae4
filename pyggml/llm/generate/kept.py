"""A context in which one text follows another: what both begin with is evaluated once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any

from pyggml.errors import ModelError, SamplerError
from pyggml.signature import hands_on, keywords_of

from ..loaded import LoadedModel
from ..options import ContextOptions
from .batched import new_contexts, shared_context, together
from .generation import (
    GenerateOptions,
    Generation,
    OwnContext,
    Prompt,
    TextRequest,
    in_own_context,
    new_generation,
    text_request,
    until_end,
)
from .prefixes import keep_prefix

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..context import LlamaContext
    from .engine import Token


class KeptContext:
    """A context that stays when a text ends, and knows the tokens that it holds.

    `make` makes the context when it is needed first. `held` are the tokens that sequence 0 has evaluated. Whoever keeps
    texts elsewhere, too, gives functions: `recall` is called with the tokens of a prompt before it is evaluated, and
    may put a state that begins like it into the context; `keep` is called when a text has ended. `prepare` changes
    each generation before it begins.
    """

    def __init__(
        self,
        make: Callable[[], LlamaContext],
        recall: Callable[[Sequence[int]], None] | None = None,
        keep: Callable[[], None] | None = None,
        prepare: Callable[[Generation], Generation] | None = None,
    ) -> None:
        self._make, self._recall, self._keep, self._prepare = make, recall, keep, prepare
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

    def start(self, model: LoadedModel, text: TextRequest) -> Generation | None:
        """The generation of a text, for `run`; None when another text is under way. Raises ModelError when the context
        is one of another model, and what `TextRequest.start` raises."""
        with self._lock:
            if self._last is not None and self._last() is not None:
                return None
            if self.ctx.model is not model:
                raise ModelError(f"kept is a context of another model, {self.ctx.model!r}")
            g = text.start(self.ctx)
            if self._prepare is not None:
                g = self._prepare(g)
            self._last = weakref.ref(g)
            return g

    def run(self, g: Generation) -> Generator[Token]:
        """The tokens of a generation that `start` gave; to be run once. First, what is held is cut back to what the
        prompt begins with."""
        memory = self.ctx.memory
        reuses = g.reuses and len(g.prompt) > 0
        if reuses and g.media is None and self._recall is not None:
            self._recall(g.prompt)
        n = keep_prefix(memory, 0, self._held, list(g.keys), g.media) if reuses else 0
        if n == 0:
            memory.clear()
        del self._held[n:]
        g.n_past = g.n_done = n
        try:
            yield from g
        finally:
            self._held[:] = [*g.keys, *g.ids][: min(g.n_done, memory.seq_pos_max(0) + 1)]
            self._last = None
            if self._keep is not None and g.media is None:
                self._keep()


def begin(
    model: LoadedModel, text: TextRequest, own: OwnContext, kept: KeptContext | None = None
) -> tuple[Generation, Iterator[Token]]:
    """The generation of a text, and its tokens: in the context that is kept, or in one of its own (with the options
    `own`) when another text is under way there, or the text needs more than one sequence. Raises what `Model.stream`
    raises."""
    g = None
    if not isinstance(kept, KeptContext | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"kept must be what model.keep_context() gives, not {kept!r:.60}")
    if kept is not None and not text.source and own.get("cfg_scale", 1) == 1:
        g = kept.start(model, text)
    if kept is None or g is None:
        g = in_own_context(model, text, **own)
        return g, until_end(g)
    return g, kept.run(g)


@hands_on(*keywords_of(new_generation))
def stream_tokens(
    model: LoadedModel,
    prompt: Prompt,
    n_predict: int,
    n_probs: int | None,
    kept: KeptContext | None = None,
    **options: Unpack[GenerateOptions],
) -> Iterator[Token]:
    """The tokens of `Model.stream`: in a context that is kept, see `begin`, or in one of their own."""
    if kept is None:
        return until_end(new_generation(model, prompt, n_predict, n_probs, **options))
    given: Any = dict(options)
    own: OwnContext = {k: given.pop(k) for k in OwnContext.__annotations__ if k in given}  # pyright: ignore[reportAssignmentType]
    processors, stopping, special = (given.pop(k, ()) for k in ("logits_processor", "stopping_criteria", "special"))
    text = text_request(model, prompt, n_predict, n_probs, processors, stopping, bool(special), given)
    return begin(model, text, own, kept)[1]


def begin_several(
    model: LoadedModel, texts: Sequence[TextRequest], own: OwnContext, n_parallel: int = 8
) -> tuple[list[Generation], Iterator[tuple[int, Token]]]:
    """The generations of several texts in a context that they share, `n_parallel` at a time, and their tokens with the
    index of the text. What they begin with alike is evaluated once. Raises SamplerError with `cfg_scale`, and what
    `Model.stream` raises."""
    if own.get("cfg_scale", 1) != 1:
        raise SamplerError("classifier-free guidance (cfg_scale) gives one answer, not several")
    most = own.get("n_ctx") or model.hparams.n_ctx_train
    n_cells = [
        max(len(t.prompt), min(most, len(t.prompt) + t.params.n_predict) if t.params.n_predict >= 0 else most)
        for t in texts
    ]
    options: ContextOptions = {"n_threads": own.get("n_threads"), "flash_attn": own.get("flash_attn", False)}
    sizes = [(len(t.source), n) for t, n in zip(texts, n_cells, strict=True)]
    ctx = shared_context(new_contexts(model, options, own.get("context")), n_parallel, sizes)
    started = [replace(t, index=i).start(ctx, n) for i, (t, n) in enumerate(zip(texts, n_cells, strict=True))]
    return started, ((g.index, token) for g, token in together(ctx, started))


def several(text: TextRequest, n: int) -> list[TextRequest]:
    """The same text `n` times, each sampled with a seed of its own: the given one, and those that follow it."""
    seed = text.params.seed
    seeds = [seed if seed is None or seed < 0 else seed + i for i in range(n)]
    return [replace(text, params=replace(text.params, seed=s)) for s in seeds]
