"""Several prompts at once, each continued as `Model.stream` would: the adapters of an engine over a shared context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from pyggml.errors import BatchError, SamplerError, whole
from pyggml.signature import hands_on, keywords_of

from ..context import LlamaContext
from ..decoder import Decoder
from ..samplers import (
    N_PREDICT,
    TEXT_KEYWORDS,
    LogitsProcessor,
    SamplingOptions,
    TextOptions,
    TextParams,
    our_names,
    text_params,
    with_options,
)
from .engine import Engine, Failed
from .generation import (
    Generation,
    Prompt,
    RunOptions,
    StoppingCriteria,
    TextRequest,
    Token,
    functions,
    read_prompt,
    sizes_to_encode,
    source_and_prompt,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..loaded import LoadedModel
    from ..options import ContextOptions

NewContext = Callable[[int, "ContextOptions"], Decoder]  # makes a context with that many cells


class BatchOptions(RunOptions, total=False):
    """Keyword arguments of `Model.generate_batch` and `stream_batch`."""

    each: Sequence[SamplingOptions | Mapping[str, Any]] | None
    n_parallel: int


@hands_on(*TEXT_KEYWORDS)
def stream_batch(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    n_predict: int = N_PREDICT,
    n_probs: int | None = 0,
    *,
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] = (),
    stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria] = (),
    each: Sequence[SamplingOptions | Mapping[str, Any]] | None = None,
    n_parallel: int = 8,
    n_threads: int | None = None,
    flash_attn: bool = False,
    context: ContextOptions | None = None,
    **asked: Unpack[TextOptions],
) -> Iterator[tuple[int, Token]]:
    """Continue all prompts, each as `Model.stream` would, `n_parallel` at a time: when one ends, the next begins.
    Yields (index of the prompt, token). `n_probs` None: tokens have no log-probabilities.

    `each`: for each prompt a dict with its own options (sampling, `n_predict`, `stop`). A prompt without a seed of its
    own is sampled with the common seed + its index, so that equal prompts get different texts.

    The context has room for the longest `n_parallel` texts. Beginnings that prompts have in common are evaluated once.
    With the same seed, or greedy sampling, the tokens are those of `Model.stream` (docs/company.md).
    Raises BatchError for an empty prompt or a bad `n_parallel`, and what `Model.stream` raises.
    """
    of_all = text_params(n_predict, asked)
    whole("n_parallel", n_parallel, 1, error=BatchError)
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BatchError(f"prompts must be a list, not {prompts!r:.60}")
    read = [read_prompt(model, p) for p in prompts]
    texts = [source_and_prompt(model, ids) for ids, _, _ in read]
    for i, (_, ids) in enumerate(texts):
        if not ids:
            raise BatchError(f"prompt {i} is empty")
    if not texts or of_all.n_predict == 0:
        return iter(())
    params = _params_of_each(of_all, each, len(texts))
    processors = functions("logits_processor", logits_processor)
    stopping = functions("stopping_criteria", stopping_criteria)
    requests = [
        TextRequest(ids, replace(p, stop=(*end, *p.stops)), source, n_probs, processors, stopping, index=i, media=media)
        for i, ((source, ids), p, (_, media, end)) in enumerate(zip(texts, params, read, strict=True))
    ]
    n_cells = [
        len(r.prompt) + r.params.n_predict if r.params.n_predict >= 0 else max(model.hparams.n_ctx_train, len(r.prompt))
        for r in requests
    ]
    sizes = [(len(r.source), n) for r, n in zip(requests, n_cells, strict=True)]
    own_context: ContextOptions = {"n_threads": n_threads, "flash_attn": flash_attn}
    ctx = shared_context(new_contexts(model, own_context, context), n_parallel, sizes)
    started = [r.start(ctx, n) for r, n in zip(requests, n_cells, strict=True)]
    generations = [g for g in started if g.n_predict]
    return ((g.index, token) for g, token in together(ctx, generations))


def new_contexts(model: LoadedModel, own: ContextOptions, context: ContextOptions | None) -> NewContext:
    """A function that makes contexts of a model. Options in `context` replace all others, except for the number of
    sequences."""

    def new_context(n_ctx: int, options: ContextOptions) -> LlamaContext:
        given: ContextOptions = {**own, **options, **(context or {})}
        given["n_seq_max"] = options.get("n_seq_max", 1)
        return LlamaContext(model, n_ctx, **given)

    return new_context


def shared_context(new_context: NewContext, n_parallel: int, sizes: Sequence[tuple[int, int]]) -> Decoder:
    """A context with room for the longest `n_parallel` of several texts. `sizes`: for each text the tokens to encode
    and the cells that it needs."""
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


def _params_of_each(
    of_all: TextParams, each: Sequence[SamplingOptions | Mapping[str, Any]] | None, n: int
) -> list[TextParams]:
    """The parameters of each prompt: the common ones with another seed, changed by the prompt's own options."""
    given = cast("Sequence[object]", [{}] * n if each is None else each if isinstance(each, Sequence) else ())  # pyright: ignore[reportUnnecessaryIsInstance]
    if len(given) != n or not all(isinstance(o, Mapping) for o in given):
        raise BatchError(f"each must be a list of {n} dicts, one for each prompt")
    params: list[TextParams] = []
    for i, own in enumerate(our_names(cast("Mapping[str, Any]", o)) for o in given):
        seed = {} if of_all.seed is None or of_all.seed < 0 else {"seed": of_all.seed + i}
        try:
            params.append(with_options(of_all, {**seed, **own}))
        except TypeError as e:
            raise SamplerError(f"prompt {i}: {e}") from None
        except (BatchError, SamplerError) as e:
            raise type(e)(f"prompt {i}: {e}") from None
    return params


@hands_on(*keywords_of(stream_batch))
def generate_batch(
    model: LoadedModel,
    prompts: Sequence[Prompt],
    n_predict: int = N_PREDICT,
    **options: Unpack[BatchOptions],
) -> list[str]:
    """The texts that follow several prompts, evaluated `n_parallel` (8) at a time, see `stream_batch`."""
    tokens = stream_batch(model, prompts, n_predict, None, **options)
    texts = [""] * len(prompts)
    for i, token in tokens:
        texts[i] += token.text
    return texts
