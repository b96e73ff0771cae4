"""Several generations in one context, continuous batching: each step evaluates a token of every text that is under way,
and the prompts of those that join as others end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pyggml.errors import BatchError, SamplerError, whole

from ..batch import Batch
from ..context import LlamaContext
from ..decoder import Decoder
from ..samplers import LogitsProcessor, NamedOptions, SamplerChain, SamplingOptions, our_names, sampling_params
from .drafters import common_prefix
from .generation import (
    N_PREDICT,
    Generation,
    StoppingCriteria,
    Token,
    functions,
    n_predict_of,
    sizes_to_encode,
    source_and_prompt,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..loaded import LoadedModel
    from ..options import ContextOptions

Failed = Callable[[int, Exception], None]  # the index of a generation, and what ended it
_WORTH_WAITING = 16  # a prompt waits for another's evaluation to share this many tokens more than it can now


class BatchOptions(NamedOptions, total=False):
    """Keyword arguments of `Model.generate_batch` and `stream_batch`: the fields of `SamplingParams`, their names in
    `OTHER_NAMES`, and these."""

    stop: str | Sequence[str]
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor]
    stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria]
    each: Sequence[SamplingOptions | Mapping[str, Any]] | None
    n_parallel: int
    n_threads: int | None
    flash_attn: bool
    context: ContextOptions | None


@dataclass
class _Slot:
    """A sequence of the context: the generation in it, and which tokens of its text are evaluated."""

    seq: int
    index: int = -1
    generation: Generation | None = None
    text: tuple[int, ...] = ()  # prompt and continuation; of an ended generation they stay until another comes
    n_done: int = 0

    @property
    def todo(self) -> tuple[int, ...]:
        """Tokens that wait for evaluation."""
        return self.text[self.n_done :] if self.generation is not None else ()


def stream_batch(
    model: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    n_predict: int = N_PREDICT,
    n_probs: int | None = None,
    *,
    stop: str | Sequence[str] = (),
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] = (),
    stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria] = (),
    each: Sequence[SamplingOptions | Mapping[str, Any]] | None = None,
    n_parallel: int = 8,
    n_threads: int | None = None,
    flash_attn: bool = False,
    context: ContextOptions | None = None,
    **options: Unpack[NamedOptions],
) -> Iterator[tuple[int, Token]]:
    """Continue all prompts, each as `Model.stream` would, `n_parallel` at a time. Yields (index of the prompt, token).

    `each`: for each prompt a dict of what differs for it from the sampling parameters of all; it may also have an
    `n_predict` and a `stop` of its own. Prompt i is sampled with seed + i where it has no seed of its own: equal
    prompts get different texts.

    The context has room for the longest `n_parallel` of them. Beginnings that prompts have in common are evaluated
    once. Under greedy sampling the tokens are those of `Model.stream`, unless two are as good as equally likely: what
    is evaluated together rounds otherwise in the F16 of the cache.
    Raises BatchError for an empty prompt or a bad `n_parallel`, and what `Model.stream` raises.
    """
    n_predict, sampling = n_predict_of(n_predict, options)
    n_predict = whole("n_predict", n_predict, error=BatchError)
    if whole("n_parallel", n_parallel, error=BatchError) < 1:
        raise BatchError(f"n_parallel must be at least 1, not {n_parallel}")
    if not isinstance(prompts, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BatchError(f"prompts must be a list, not {prompts!r:.60}")
    texts = [source_and_prompt(model, p) for p in prompts]
    ids = [tokens for _, tokens in texts]
    for i, tokens in enumerate(ids):
        if not tokens:
            raise BatchError(f"prompt {i} is empty")
    if not ids or n_predict == 0:
        return iter(())
    n_seq = min(n_parallel, len(ids))
    own = _own(each, len(ids))
    limits = [
        whole(f"each[{i}]: n_predict", o.pop("n_predict", n_predict), error=BatchError) for i, o in enumerate(own)
    ]
    stops = [o.pop("stop", stop) for o in own]
    chains = [_chain(model, i, {**_later(sampling, i), **o}, logits_processor) for i, o in enumerate(own)]
    stopping = functions("stopping_criteria", stopping_criteria)
    n_ctx = [
        len(tokens) + n if n >= 0 else max(model.hparams.n_ctx_train, len(tokens))
        for tokens, n in zip(ids, limits, strict=True)
    ]
    longest = max(len(source) for source, _ in texts)
    own_context: ContextOptions = {"n_threads": n_threads, "flash_attn": flash_attn}
    if longest:
        own_context.update(sizes_to_encode(longest))
    own_context.update(context or {})
    own_context["n_seq_max"] = n_seq
    n_cells = sum(sorted(max(n, len(source)) for n, (source, _) in zip(n_ctx, texts, strict=True))[-n_seq:])
    ctx = LlamaContext(model, n_cells, **own_context)
    waiting: deque[tuple[int, Generation]] = deque()
    for i, (source, tokens) in enumerate(texts):
        chains[i].prime(tokens)
        ends = (stops[i],) if isinstance(stops[i], str) else stops[i]
        if limits[i]:
            g = Generation(ctx, tokens, chains[i], limits[i], ends, n_probs, source=source, stopping=stopping)
            waiting.append((i, g))
    return in_slots(ctx, Waiting(waiting), n_ctx)


class Waiting:
    """Generations that wait for a slot, with their indices; each is made when it is the next one."""

    def __init__(self, items: Iterable[tuple[int, Generation]]) -> None:
        self._items = iter(items)
        self._first: tuple[int, Generation] | None = None

    def first(self) -> tuple[int, Generation] | None:
        """The next one, which stays; None where there are no more."""
        if self._first is None:
            self._first = next(self._items, None)
        return self._first

    def take(self) -> None:
        """Forget the first one."""
        self._first = None


def _own(each: Sequence[SamplingOptions | Mapping[str, Any]] | None, n: int) -> list[dict[str, Any]]:
    """What each prompt has of its own."""
    if each is None:
        return [{} for _ in range(n)]
    given = cast("Sequence[object]", each if isinstance(each, Sequence) and not isinstance(each, str) else ())  # pyright: ignore[reportUnnecessaryIsInstance]
    if len(given) != n or not all(isinstance(o, Mapping) for o in given):
        raise BatchError(f"each must be a list of {n} dicts, one for each prompt")
    return [our_names(o) for o in each]


def _later(sampling: SamplingOptions, i: int) -> SamplingOptions:
    """The same with another seed for each i, where there is one."""
    seed = sampling.get("seed")
    return {**sampling, "seed": seed + i} if isinstance(seed, int) and seed >= 0 else sampling


def _chain(
    model: LoadedModel, i: int, options: dict[str, Any], processors: LogitsProcessor | Sequence[LogitsProcessor]
) -> SamplerChain:
    try:
        params = sampling_params(options)
    except TypeError as e:
        raise SamplerError(f"prompt {i}: {e}") from None
    return SamplerChain(params, model.vocab, functions("logits_processor", processors))


def generate_batch(
    model: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    n_predict: int = N_PREDICT,
    **options: Unpack[BatchOptions],
) -> list[str]:
    """The texts that follow the prompts, see `stream_batch`."""
    tokens = stream_batch(model, prompts, n_predict, **options)
    texts = [""] * len(prompts)
    for i, token in tokens:
        texts[i] += token.text
    return texts


def in_slots(
    ctx: Decoder, waiting: Waiting, n_ctx: Sequence[int], failed: Failed | None = None
) -> Iterator[tuple[int, Token]]:
    """Run generations of `ctx` in as many sequences as it has, and close it. `n_ctx`: cells that each may take, by
    index. Yields (index, token). A generation that cannot choose a token ends; `failed` is told why, and without it
    the error is raised."""
    slots = [_Slot(seq) for seq in range(ctx.memory.n_seq_max)]
    with ctx:
        while True:
            _admit(ctx, slots, waiting)
            active = [s for s in slots if s.generation is not None]
            if not active:
                return
            for slot, row in _decode(ctx, active):
                g = slot.generation
                assert g is not None
                try:
                    token = g.choose(ctx.logits[row], slot.n_done < n_ctx[slot.index])
                except Exception as e:
                    if failed is None:
                        raise
                    slot.generation = None
                    failed(slot.index, e)
                    continue
                if token.finish_reason is None:
                    slot.text += (token.id,)
                else:
                    slot.generation = None
                yield slot.index, token


def _decode(ctx: Decoder, active: Sequence[_Slot]) -> list[tuple[_Slot, int]]:
    """Evaluate what waits, single tokens before prompts. Returns whose turn it is to choose a token, and by which row
    of the logits."""
    batch = Batch()
    ready: list[tuple[_Slot, int]] = []
    for slot in sorted(active, key=lambda s: len(s.todo) > 1):
        todo = slot.todo
        n = min(len(todo), ctx.n_batch - len(batch))
        for i, token in enumerate(todo[:n], 1):
            batch.add(token, slot.n_done, slot.seq, i == len(todo))
            slot.n_done += 1
        if n == len(todo):
            ready.append((slot, len(ready)))
    ctx.decode(batch)
    return ready


def _admit(ctx: Decoder, slots: Sequence[_Slot], waiting: Waiting) -> None:
    """Give free slots to waiting prompts, in their order; what a prompt has in common with a text is shared with it."""
    for slot in slots:
        first = None if slot.generation is not None else waiting.first()
        if first is None:
            continue
        index, g = first
        prompt = tuple(g.prompt)
        source, n = slot, 0
        if ctx.memory.keeps_all:  # else beginnings are not there any more
            shared = {s.seq: common_prefix(prompt[:-1], s.text) for s in slots}
            source = max(slots, key=lambda s: min(shared[s.seq], s.n_done))
            n = min(shared[source.seq], source.n_done)
            if max(shared[s.seq] for s in slots if s.generation is not None or s is source) >= n + _WORTH_WAITING:
                return
        if source is slot:
            ctx.memory.seq_rm(slot.seq, n, -1)
        else:
            ctx.memory.seq_rm(slot.seq)
            ctx.memory.seq_cp(source.seq, slot.seq, 0, n)
        waiting.take()
        if g.source:
            ctx.encode(Batch.prompt(g.source, 0, slot.seq))
        slot.index, slot.generation, slot.text, slot.n_done = index, g, prompt, n
