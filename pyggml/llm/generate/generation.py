"""Text from a context, token by token."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from numbers import Real
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, TypeVar, cast

import numpy as np
import numpy.typing as npt

from pyggml.errors import BatchError, KVCacheFull, ModelError, SamplerError, whole
from pyggml.models.memory.kv_cells import INT32_MAX
from pyggml.signature import hands_on
from pyggml.types import Floats

from ..batch import Batch, MediaRow
from ..context import LlamaContext
from ..decoder import Decoder
from ..media_prompt import MediaPrompt, PlacedMedia
from ..options import ContextOptions
from ..samplers import (
    N_PREDICT,
    TEXT_KEYWORDS,
    LogitsProcessor,
    SamplerChain,
    TextOptions,
    TextParams,
    guided,
    log_softmax,
    text_params,
)
from .engine import Engine, FinishReason, Pending, Placed, Steps, Token
from .long_context import LongContext
from .text import TextStream

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ..adapters.active import Scaled
    from ..loaded import LoadedModel
    from .speculative import DraftStats

# Text, token ids, a prompt with pictures or sounds, or the messages of a chat.
Prompt: TypeAlias = "str | Sequence[int] | MediaPrompt | Sequence[Mapping[str, Any]]"
StoppingCriteria = Callable[[npt.NDArray[np.int64], Floats], bool]  # the ids so far, and the logits of the last one
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Timings:
    """Seconds and counts, as in llama.cpp: `prompt` for evaluating the prompt, `eval` for evaluating the generated
    tokens (all but the last), `sample` for choosing tokens."""

    n_prompt: int = 0
    prompt: float = 0.0
    n_eval: int = 0
    eval: float = 0.0
    n_sample: int = 0
    sample: float = 0.0


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance: a negative prompt, evaluated as sequence 1 of the same context, and its scale."""

    scale: float
    negative: Sequence[int]


@dataclass(eq=False)
class Generation:
    """The text that follows `prompt`, which is appended to sequence 0 of the context. Iterate over it once for the
    tokens, or give it to an `Engine`. An encoder-decoder encodes `source` first.

    It ends after `n_predict` tokens (negative: any number), or when the context is full and `long` makes no room.
    `ids`, `timings` and `finish_reason` tell how far it came, also when it was broken off: Ctrl-C leaves the context
    whole, with all of `ids` evaluated but the last. Raises BatchError for a bad prompt, KVCacheFull when it does not
    fit, SamplerError.
    """

    ctx: Decoder
    prompt: Sequence[int]
    chain: SamplerChain
    n_predict: int = N_PREDICT
    stop: Sequence[str] = ()
    n_probs: int | None = None  # None: no log-probabilities at all
    guidance: Guidance | None = None
    long: LongContext | None = None
    n_past: int = 0  # tokens of the prompt that its sequence holds already
    source: Sequence[int] = ()
    stopping: Sequence[StoppingCriteria] = ()  # called after each token; any of them may end the text
    special: bool = False  # whether control tokens are shown as text
    reuses: bool = True  # whether a beginning that another sequence has evaluated need not be evaluated again
    progress: Callable[[int, int], None] | None = None  # called with the prompt's tokens: those evaluated, and all
    n_cells: int | None = None  # cells that it may use, beside other generations; None: it has the context to itself
    index: int = 0  # the place of its prompt among several
    media: PlacedMedia | None = None  # what the prompt has of pictures and sounds
    loras: Sequence[Scaled] | None = None  # adapters of its own; None: those of the context
    wants_seq: int | None = None  # the sequence that it must have; None: any
    is_alone: bool = field(default=True, init=False)  # whether no other text was evaluated beside its last tokens
    began: float = field(default=0.0, init=False)  # `perf_counter` when its prompt's turn came
    seq: int = field(default=0, init=False)
    n_done: int = field(default=0, init=False)  # tokens that its sequence holds
    ids: list[int] = field(default_factory=list[int], init=False)
    timings: Timings = field(default_factory=Timings, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._text = TextStream(self.ctx.model.vocab, self.stop, self.special)
        stage, n_layer = self.ctx.model.stage, self.ctx.model.hparams.n_layer
        if stage is not None and stage != range(n_layer):
            raise ModelError(f"layers {stage.start} to {stage.stop} of {n_layer} are a stage, which gives no text")
        if self.n_probs is not None:
            whole("n_probs", self.n_probs, 0, None, BatchError)

    @classmethod
    def like(cls, g: Generation, **more: Any) -> Self:
        """A generation of this class that is given all that `g`, which has not begun, was given, and `more`."""
        return cls(**{f.name: getattr(g, f.name) for f in fields(Generation) if f.init}, **more)

    @property
    def stop_string(self) -> str:
        """The stop string that ended the text; "" when something else did, or nothing yet."""
        return self._text.found

    @property
    def draft_stats(self) -> DraftStats | None:
        """How many guessed tokens were right; None without drafts."""
        return None

    def check_room(self) -> None:
        """Raises KVCacheFull, naming both lengths, when the prompt does not fit the context."""
        memory, n = self.ctx.memory, len(self.prompt) - self.n_past
        what = f"the prompt has {n} tokens"
        if self.guidance is not None:
            n_negative = len(self.prompt if self.source else self.guidance.negative)
            n += n_negative
            what += f", the negative one {n_negative}"
        free = memory.size - memory.used
        if n > free:
            taken = f", of which {memory.used} are taken" if memory.used else ""
            raise KVCacheFull(f"{what}; the context has room for {memory.size}{taken}", n, free)

    def rest(self) -> str:
        """The text that was still held back when a generation was broken off."""
        return self._text.flush()

    @property
    def n_prompt(self) -> int:
        """How many tokens the given text has: the prompt, or the source of an encoder-decoder."""
        return len(self.source or self.prompt)

    @property
    def keys(self) -> Sequence[int]:
        """What the tokens of the prompt are compared by with those of other prompts."""
        return self.prompt if self.media is None else self.media.keys

    def whole(self, n: int) -> int:
        """See `PlacedMedia.whole`."""
        return n if self.media is None else self.media.whole(n)

    def n_next(self, n: int) -> int:
        """How many of the next `n` tokens can be evaluated before those behind them."""
        return self.whole(self.n_done + n) - self.n_done

    def media_at(self, places: Sequence[int]) -> dict[int, MediaRow]:
        """The rows of pictures and sounds at these places of the prompt, by the index in `places`."""
        rows = () if self.media is None else self.media.rows
        found = ((i, rows[at]) for i, at in enumerate(places) if at < len(rows))
        return {i: row for i, row in found if row is not None}

    def __iter__(self) -> Generator[Token, None, None]:
        for _, token in Engine(self.ctx, (self,)).run():
            yield token

    def steps(self) -> Steps:
        """What is to be evaluated, and the tokens that are chosen, in turn; an engine sends the logits."""
        timings = self.timings
        self.began = start = perf_counter()
        logits = yield from self._prefill()
        timings.n_prompt = len(self.source) + len(self.prompt) - self.n_past
        timings.prompt = perf_counter() - start
        if self.n_predict == 0:
            self.finish_reason = "length"
            return
        while True:
            token = self._choose(logits)
            yield token
            if token.finish_reason is not None:
                return
            start = perf_counter()
            logits = yield from self._step(token.id)
            timings.eval += perf_counter() - start
            timings.n_eval += 1

    # -- evaluation -------------------------------------------------------------------------------------------------

    def _prefill(self) -> Generator[Pending, Floats, Floats]:
        """Let the prompt be evaluated; returns the logits [n_vocab] after its last token."""
        ctx, prompt = self.ctx, self.prompt
        if not prompt:
            raise BatchError("the prompt is empty")
        if self.n_cells is None:
            self.check_room()
        if self.source:
            ctx.encode(Batch.prompt(self.source, 0, self.seq))
        self.n_done, rows = self.n_past, ctx.logits
        todo = prompt[self.n_past :]
        for part in (todo,) if self.long is None else self.long.parts(todo):
            rows = yield from self._evaluate(part)
        logits = rows[-1]
        if self.guidance is None:
            return logits
        ids = self.guidance.negative
        if self.source:
            ctx.encode(Batch.prompt(ids, 0, 1))
            ids = prompt
        first = ctx.memory.seq_pos_max(1) + 1
        for i in range(0, max(len(ids), 1), ctx.n_batch):
            part = ids[i : i + ctx.n_batch]
            rows = yield Placed(part, range(first + i, first + i + len(part)), (1,) * len(part))
        return guided(logits, rows[-1], self.guidance.scale)

    def _pending(self, tokens: Sequence[int]) -> Pending:
        """The tokens of the text that are not evaluated yet."""
        if self.n_cells is None:
            return tokens
        n, at = len(tokens), self.n_done
        return Placed(tokens, range(at, at + n), (self.seq,) * n)

    def _part(self, tokens: Sequence[int]) -> Generator[Pending, Floats, Floats]:
        """Let a part of the prompt be evaluated, or its first tokens; returns the logits after the last of them."""
        return (yield self._pending(tokens))

    def _evaluate(self, tokens: Sequence[int]) -> Generator[Pending, Floats, Floats]:
        """Let tokens of the text be evaluated, in as many batches as they need; returns the logits after the last."""
        rows = self.ctx.logits
        while tokens:
            at = self.n_done
            rows = yield from self._part(tokens)
            tokens = tokens[self.n_done - at :]
            if self.progress is not None:
                self.progress(self.n_done, len(self.prompt))
        return rows

    def _step(self, token: int) -> Generator[Pending, Floats, Floats]:
        """Let a token be evaluated; returns the logits [n_vocab] after it."""
        if self.guidance is None:
            return (yield self._pending((token,)))[-1]
        pos = [self.ctx.memory.seq_pos_max(seq) + 1 for seq in (0, 1)]
        rows = yield Placed((token, token), pos, (0, 1), 2)
        return guided(rows[0], rows[1], self.guidance.scale)

    def _has_room(self) -> bool:
        """Whether the context takes another token; it is shifted when that makes room."""
        if self.n_cells is not None and (self.long is None or self.n_done < self.n_cells):
            return self.n_done < self.n_cells
        if self.n_cells is not None and self.long is not None:
            has_room = self.long.make_room()
            self.n_done = self.long.n_past
            return has_room
        if self.long is not None:
            return self.long.make_room()
        memory = self.ctx.memory
        return memory.size - memory.used >= (1 if self.guidance is None else 2)

    # -- choice -----------------------------------------------------------------------------------------------------

    def _choose(self, logits: Floats) -> Token:
        """Choose the next token, by the logits after the text."""
        start = perf_counter()
        token = self._sample(logits)
        piece = self._take(token, logits)
        self.timings.sample += perf_counter() - start
        self.timings.n_sample += 1
        self.ctx.perf_sampled(start)
        return self._record(piece, token, logits)

    def _take(self, token: int, logits: Floats) -> str:
        """Append a token to the text, and return the text that can be shown now. The generation ends with this token
        when the token says so, or when there is no room to evaluate it."""
        text = self._text
        if self.ctx.model.vocab.is_eog(token):
            self.finish_reason = "eog"
            return (text.push(token) if self.special else "") + text.flush()
        self.chain.accept(token)
        self.ids.append(token)
        piece = text.push(token)
        if text.stopped:
            self.finish_reason = "stop"
        elif self.stopping and self._is_to_stop(logits):
            piece += text.flush()
            self.finish_reason = "stop"
        elif len(self.ids) == self.n_predict or not self._has_room():
            piece += text.flush()
            self.finish_reason = "stop" if text.stopped else "length"
        return piece

    def _is_to_stop(self, logits: Floats) -> bool:
        ids = np.array([*self.prompt, *self.ids], np.int64)
        return any(f(ids, logits) for f in self.stopping)

    def _sample(self, logits: Floats) -> int:
        return self.chain.sample(logits)

    def _record(self, piece: str, token: int, logits: Floats) -> Token:
        trace = self.chain.traces[-1] if self.chain.traces else None
        if self.n_probs is None:
            return Token(piece, token, None, (), self.finish_reason, trace)
        logprobs = log_softmax(logits)
        top: tuple[tuple[int, float], ...] = ()
        if n := min(self.n_probs, len(logprobs)):
            best = np.argpartition(logprobs, len(logprobs) - n)[len(logprobs) - n :].tolist()
            top = tuple((i, logprobs.item(i)) for i in sorted(best, key=lambda i: (-logprobs.item(i), i)))
        return Token(piece, token, logprobs.item(token), top, self.finish_reason, trace)


class AfterSamplers(Generation):
    """A generation whose tokens have the log-probabilities that the samplers leave them, not the model's own. `top` has
    only tokens that could be chosen, so it may have fewer than `n_probs`."""

    def _sample(self, logits: Floats) -> int:
        token, self._left, self._probs = self.chain.sample_and_probs(logits)
        return token

    def _record(self, piece: str, token: int, logits: Floats) -> Token:
        ids, probs = self._left, self._probs
        own = math.log(probs[ids == token].item())
        rows = np.argsort(-probs, kind="stable")[: self.n_probs or 0].tolist()
        top = tuple((ids.item(i), math.log(probs.item(i))) for i in rows if probs.item(i) > 0)
        return Token(piece, token, own, top, self.finish_reason)


class RunOptions(TextOptions, total=False):
    """Keyword arguments of every function that continues prompts, one or several."""

    logits_processor: LogitsProcessor | Sequence[LogitsProcessor]
    stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria]
    n_threads: int | None
    flash_attn: bool
    context: ContextOptions | None


class GenerateOptions(RunOptions, total=False):
    """Keyword arguments of `Model.generate` and its kin."""

    n_ctx: int | None
    cfg_scale: float
    negative_prompt: str | Sequence[int]
    special: bool


@dataclass(frozen=True)
class TextRequest:
    """A text that is asked for: the tokens it continues, and all options. `start` puts it into a context.

    source     the tokens that an encoder-decoder encodes
    n_probs, stopping, special, reuses, index, media, long, loras, wants_seq   as of a `Generation`
    processors change logits before all samplers
    kind       the class of the generation
    """

    prompt: Sequence[int]
    params: TextParams
    source: Sequence[int] = ()
    n_probs: int | None = None
    processors: Sequence[LogitsProcessor] = ()
    stopping: Sequence[StoppingCriteria] = ()
    special: bool = False
    reuses: bool = True
    index: int = 0
    kind: type[Generation] = Generation
    media: PlacedMedia | None = None
    long: LongContext | None = None
    loras: Sequence[Scaled] | None = None
    wants_seq: int | None = None

    @property
    def n_prompt(self) -> int:
        """How many tokens the given text has: the prompt, or the source of an encoder-decoder."""
        return len(self.source or self.prompt)

    def start(self, ctx: Decoder, n_cells: int | None = None, guidance: Guidance | None = None) -> Generation:
        """The generation of this text in a context, as its only one (None) or beside others, with `n_cells` cells.
        Raises SamplerError for a bad grammar or bias."""
        chain = SamplerChain(self.params, ctx.model.vocab, self.processors)
        chain.prime(self.prompt)
        g = self.kind(
            ctx,
            self.prompt,
            chain,
            self.params.n_predict,
            self.params.stops,
            self.n_probs,
            guidance,
            source=self.source,
            stopping=self.stopping,
            special=self.special,
            reuses=self.reuses,
            n_cells=n_cells,
            index=self.index,
            media=self.media,
            long=self.long,
            loras=self.loras,
            wants_seq=self.wants_seq,
        )
        if n_cells is not None or not self.params.lookup:
            return g
        from .lookup import with_lookup  # it knows generations

        return with_lookup(g)


class OwnContext(TypedDict, total=False):
    """Options of the context that a text has to itself."""

    n_ctx: int | None
    n_threads: int | None
    flash_attn: bool
    cfg_scale: float
    negative_prompt: str | Sequence[int]
    context: ContextOptions | None


def in_own_context(
    model: LoadedModel,
    text: TextRequest,
    *,
    n_ctx: int | None = None,
    n_threads: int | None = None,
    flash_attn: bool = False,
    cfg_scale: float = 1.0,
    negative_prompt: str | Sequence[int] = "",
    context: ContextOptions | None = None,
) -> Generation:
    """The generation of a text in a context of its own. Arguments and errors: see `Model.stream`."""
    source, ids, n_predict = text.source, text.prompt, text.params.n_predict
    if not isinstance(cfg_scale, Real) or not isfinite(cfg_scale):
        raise SamplerError(f"cfg_scale must be a finite number, not {cfg_scale!r:.60}")
    guidance = None if cfg_scale == 1 else Guidance(cfg_scale, ids_of(model, negative_prompt))
    negative = () if guidance is None else guidance.negative
    n_seq_max = 1 if guidance is None else 2
    n_prompt = n_seq_max * len(ids) if source else len(ids) + len(negative)
    if n_ctx is None:
        n_ctx = n_prompt + n_seq_max * n_predict if n_predict >= 0 else max(model.hparams.n_ctx_train, n_prompt)
        n_ctx = max(n_ctx, len(source) + len(negative) if source else 0)
    n_ctx = max(whole("n_ctx", n_ctx, error=ModelError), 1)
    options: ContextOptions = {"n_threads": n_threads, "flash_attn": flash_attn}
    if source:
        options.update(sizes_to_encode(max(len(source), len(negative))))
    options.update(context or {})
    options["n_seq_max"] = n_seq_max
    return text.start(LlamaContext(model, n_ctx, **options), None, guidance)


@hands_on(*TEXT_KEYWORDS)
def new_generation(
    model: LoadedModel,
    prompt: Prompt,
    n_predict: int = N_PREDICT,
    n_probs: int | None = None,
    *,
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] = (),
    stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria] = (),
    n_ctx: int | None = None,
    n_threads: int | None = None,
    flash_attn: bool = False,
    cfg_scale: float = 1.0,
    negative_prompt: str | Sequence[int] = "",
    context: ContextOptions | None = None,
    special: bool = False,
    **asked: Unpack[TextOptions],
) -> Generation:
    """A generation in a context of its own. Arguments and errors: see `Model.stream`."""
    own: OwnContext = {"n_ctx": n_ctx, "n_threads": n_threads, "flash_attn": flash_attn, "cfg_scale": cfg_scale}
    own |= {"negative_prompt": negative_prompt, "context": context}
    text = text_request(model, prompt, n_predict, n_probs, logits_processor, stopping_criteria, special, asked)
    return in_own_context(model, text, **own)


def text_request(
    model: LoadedModel,
    prompt: Prompt,
    n_predict: int,
    n_probs: int | None,
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor],
    stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria],
    special: bool,
    asked: TextOptions,
) -> TextRequest:
    """The text that the arguments of `Model.stream` ask for. Errors: see there."""
    params = text_params(n_predict, asked)
    processors = functions("logits_processor", logits_processor)
    stopping = functions("stopping_criteria", stopping_criteria)
    given, media, stop = read_prompt(model, prompt)
    source, ids = source_and_prompt(model, given)
    params = replace(params, stop=(*stop, *params.stops)) if stop else params
    return TextRequest(ids, params, source, n_probs, processors, stopping, special, media=media)


def functions(name: str, given: F | Sequence[F]) -> Sequence[F]:
    """One function or several, as a sequence. Raises SamplerError for anything else."""
    several = cast("Sequence[F]", given if isinstance(given, (list, tuple)) else (given,))
    if not all(map(callable, several)):
        raise SamplerError(f"{name} must be a function or a list of functions, not {given!r:.60}")
    return several


def until_end(g: Generation) -> Generator[Token, None, None]:
    """The tokens of a generation in a context of its own, which is closed after the last token."""
    with g.ctx:
        yield from g


def pieces(tokens: Iterator[Token]) -> Iterator[str]:
    """The text of tokens, without empty pieces."""
    return (t.text for t in tokens if t.text)


async def in_thread(items: Iterator[T]) -> AsyncIterator[T]:
    """The items of a generator, each step of which runs in a thread; it is closed when the task is cancelled or the
    async generator is closed, after the step that is under way."""
    import asyncio  # takes longer to import than all that `generate` needs

    end = object()
    try:
        while True:
            step = asyncio.ensure_future(asyncio.to_thread(next, items, end))
            try:
                item = await asyncio.shield(step)
            except asyncio.CancelledError:
                await asyncio.wait((step,))
                raise
            if item is end:
                return
            yield item  # pyright: ignore[reportReturnType]
    finally:
        if isinstance(items, Generator):
            items.close()


def source_and_prompt(model: LoadedModel, ids: list[int]) -> tuple[list[int], list[int]]:
    """Which tokens to encode, and which to continue. An encoder-decoder encodes the given tokens and continues a start
    token. Other models encode nothing and continue the given tokens. Raises BatchError for an empty source."""
    start = model.decoder_start
    if start is None:
        return [], ids
    if not ids:
        raise BatchError("the prompt is empty")
    return ids, [start]


def sizes_to_encode(n: int) -> ContextOptions:
    """Sizes of batches in which a context can encode a text of up to `n` tokens, which it does at once."""
    return {"n_batch": max(2048, n), "n_ubatch": max(512, n)}


def read_prompt(model: LoadedModel, prompt: Prompt) -> tuple[list[int], PlacedMedia | None, tuple[str, ...]]:
    """The tokens of a prompt, what it has of pictures and sounds, and strings that end the answer. A prompt is text,
    token ids, a `MediaPrompt`, or the messages of a chat. Raises as `ids_of`, and what the towers raise."""
    if isinstance(prompt, MediaPrompt):
        return ids_of(model, prompt.ids), prompt.placed(model), ()
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
        from .media_chat import read_messages

        ids_of(model, ())  # refuses an encoder
        return read_messages(model, cast("Sequence[Mapping[str, Any]]", prompt))
    return ids_of(model, cast("str | Sequence[int]", prompt)), None, ()


def ids_of(model: LoadedModel, prompt: str | Sequence[int]) -> list[int]:
    """The tokens of a prompt. Raises BatchError for a prompt that is neither text nor token ids, ModelError for a model
    that is an encoder, which continues no prompt."""
    if not model.architecture.logits:
        raise ModelError(f"{model.arch} is an encoder: it gives embeddings (`Model.embed`) and continues no text")
    if isinstance(prompt, str):
        return model.tokenize(prompt)
    if isinstance(prompt, bytes):  # text, as `tokenize` takes it, not numbers of tokens
        return model.vocab.tokenize(prompt)
    if isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], str):
        raise BatchError("a prompt is one text; generate_batch continues several")
    if not isinstance(prompt, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BatchError(f"a prompt must be text or token ids, not {prompt!r:.60}")
    return [whole("a token", t, 0, INT32_MAX, BatchError) for t in prompt]
