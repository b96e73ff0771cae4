"""Several prompts at once, each continued as `Model.stream` would: the adapters of an engine over a shared context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pyggml.errors import BatchError, SamplerError, whole

from ..context import LlamaContext
from ..decoder import Decoder
from ..samplers import LogitsProcessor, NamedOptions, SamplerChain, SamplingOptions, our_names, sampling_params
from .engine import Engine, Failed
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

NewContext = Callable[[int, "ContextOptions"], Decoder]  # of so many cells


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
    whole("n_parallel", n_parallel, 1, error=BatchError)
    if not isinstance(prompts, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BatchError(f"prompts must be a list, not {prompts!r:.60}")
    texts = [source_and_prompt(model, p) for p in prompts]
    for i, (_, ids) in enumerate(texts):
        if not ids:
            raise BatchError(f"prompt {i} is empty")
    if not texts or n_predict == 0:
        return iter(())
    own = _own(each, len(texts))
    limits = [
        whole(f"each[{i}]: n_predict", o.pop("n_predict", n_predict), error=BatchError) for i, o in enumerate(own)
    ]
    stops = [o.pop("stop", stop) for o in own]
    chains = [_chain(model, i, {**_later(sampling, i), **o}, logits_processor) for i, o in enumerate(own)]
    stopping = functions("stopping_criteria", stopping_criteria)
    n_cells = [
        len(ids) + n if n >= 0 else max(model.hparams.n_ctx_train, len(ids))
        for (_, ids), n in zip(texts, limits, strict=True)
    ]
    sizes = [(len(source), n) for (source, _), n in zip(texts, n_cells, strict=True)]
    own_context: ContextOptions = {"n_threads": n_threads, "flash_attn": flash_attn}
    ctx = shared_context(new_contexts(model, own_context, context), n_parallel, sizes)
    generations: list[Generation] = []
    for i, (source, ids) in enumerate(texts):
        chains[i].prime(ids)
        ends = (stops[i],) if isinstance(stops[i], str) else stops[i]
        g = Generation(ctx, ids, chains[i], limits[i], ends, n_probs, source=source, stopping=stopping)
        g.n_cells, g.index = n_cells[i], i
        if limits[i]:
            generations.append(g)
    return ((g.index, token) for g, token in together(ctx, generations))


def new_contexts(model: LoadedModel, own: ContextOptions, context: ContextOptions | None) -> NewContext:
    """Contexts of a model; what `context` says goes before what is said else, but for the number of sequences."""

    def new_context(n_ctx: int, options: ContextOptions) -> LlamaContext:
        given: ContextOptions = {**own, **options, **(context or {})}
        given["n_seq_max"] = options.get("n_seq_max", 1)
        return LlamaContext(model, n_ctx, **given)

    return new_context


def shared_context(new_context: NewContext, n_parallel: int, sizes: Sequence[tuple[int, int]]) -> Decoder:
    """A context with room for the longest `n_parallel` of several texts, of each the tokens that are encoded and the
    cells."""
    n_seq = min(n_parallel, len(sizes))
    longest = max(n for n, _ in sizes)
    options: ContextOptions = {"n_seq_max": n_seq}
    if longest:
        options.update(sizes_to_encode(longest))
    return new_context(sum(sorted(map(max, sizes))[-n_seq:]), options)


def together(
    ctx: Decoder, generations: Iterable[Generation], failed: Failed | None = None
) -> Iterator[tuple[Generation, Token]]:
    """The tokens of generations that share a context, see `Engine`; it is closed at the end."""
    with ctx:
        yield from Engine(ctx, generations, failed).run()


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
