"""What all endpoints share: the model, its engine, and the way from a request to generations."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import zip_longest
from threading import Event
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from pyggml import __version__, limits
from pyggml.errors import ModelError, whole
from pyggml.llm.adapters.active import Scaled, checked
from pyggml.llm.context import LlamaContext
from pyggml.llm.generate.drafters import DraftPool
from pyggml.llm.generate.generation import (
    Generation,
    StoppingCriteria,
    TextRequest,
    sizes_to_encode,
    source_and_prompt,
)
from pyggml.llm.generate.long_context import LongContext, tokens_to_keep
from pyggml.llm.generate.lookup import with_lookup
from pyggml.llm.generate.snapshots import Snapshots
from pyggml.llm.generate.speculative import check_vocabularies, with_draft
from pyggml.llm.generate.templates import find_template
from pyggml.llm.media_prompt import PlacedMedia, media_token
from pyggml.llm.model import Model, load_model
from pyggml.llm.openai.abilities import abilities
from pyggml.llm.options import ContextOptions
from pyggml.llm.quantize.mixes import file_type_name
from pyggml.llm.samplers import LogitsProcessor, TextParams
from pyggml.llm.sense import has_sense
from pyggml.types import Floats

from .budget import ram_of_texts, slot_tokens
from .engine_thread import Answering, EngineThread
from .errors import HTTPError, of_request, too_long
from .http import EventStream, event, json_object, until_gone
from .long_json import size
from .options import ServeOptions
from .schemas import Adapter, TextBody, refuse, sampling
from .turns import LENGTH, Turns

T = TypeVar("T")
_SIDES = {"vision": "image", "audio": "audio"}
FINGERPRINT = f"pyggml-{__version__}"


class Service:
    """A model that is served.

    name      of the model, in answers
    n_slot    tokens that a slot has room for; 0 when no texts are continued
    template  of chats
    modalities  whether texts may have pictures (`vision`) and sounds (`audio`)
    has_template  whether the model, or an option, has it; chatml otherwise
    snapshots  of texts that slots have no room for
    reasoning  by the id of a chat's answer under way: what ends its reasoning
    loras     the adapters, with the scales for requests that have none of their own
    """

    def __init__(self, model: Model, options: ServeOptions) -> None:
        self.model, self.options = model, options
        if model.repacking is not None:
            model.repacking.finish()  # several texts side by side gain most from it: before the first request
        self.name = options.name_of(model.path)
        self.created = int(time.time())
        self.variables = options.template_variables
        self.template = find_template(options.template, model.kv)
        self.modalities = {
            side: media_token(model, media) is not None and has_sense(model, side) for side, media in _SIDES.items()
        }
        self.has_template = options.template is not None or "tokenizer.chat_template" in model.kv
        applied = not options.lora_init_without_apply
        self.loras = tuple((lora, scale if applied else 0.0) for lora, scale in model.loras)
        self.n_slot = slot_tokens(model, options)
        ctx = self._context()
        snapshots = None if ctx is None else Snapshots(ctx, ram_of_texts(model, options), options.ctx_checkpoints)
        if options.mtp:
            _ = model.heads  # raises when there are none
        self._drafts = None if ctx is None or options.model_draft is None else self._draft_pool(ctx)
        if ctx is not None and self.guesses and options.n_parallel > 1 and any(kv.n_swa for kv in ctx.memory.caches):
            raise ModelError("a model with windows drafts for one text at a time: n_parallel must be 1")
        self.snapshots = snapshots
        self.reasoning: WeakValueDictionary[str, Event] = WeakValueDictionary()  # while something heeds it
        self._turns = Turns()
        self.thread = EngineThread(ctx, options.n_queue, snapshots)

    def _context(self) -> LlamaContext | None:
        if not self.n_slot:
            return None
        given = {"flash_attn": True, **self.options.context}  # then each text reads its own keys and values alone
        options = cast(ContextOptions, {**given, "n_seq_max": self.options.n_parallel})
        if self.model.decoder_start is not None:
            options.update(sizes_to_encode(self.n_slot))
        return LlamaContext(self.model, self.n_slot * self.options.n_parallel, **options)

    @property
    def guesses(self) -> bool:
        """Whether tokens of texts are guessed, and several evaluated at once."""
        return self.options.lookup is True or self.options.mtp or self.options.model_draft is not None

    def _draft_pool(self, ctx: LlamaContext) -> DraftPool:
        """The contexts of the smaller model."""
        draft = load_model(self.options.model_draft)
        check_vocabularies(self.model.vocab, draft.vocab)
        options: ContextOptions = {"n_threads": ctx.n_threads}
        return DraftPool(lambda: LlamaContext(draft, self.n_slot, **options))

    def _with_guesses(self, g: Generation, params: TextParams) -> Generation:
        """The same generation with the drafts that the server was told to make, or else with prompt lookup."""
        o = self.options
        if type(g) is not Generation or self.model.decoder_start is not None:
            return g
        if not self.guesses:
            return g if o.lookup is False or not params.lookup else with_lookup(g)
        by = self.model.heads if o.mtp else self._drafts
        return with_draft(g, by, o.draft_max, o.draft_min, o.draft_p_min)

    def adapters(self, asked: Sequence[Any] | None) -> tuple[Scaled, ...] | None:
        """The adapters of a request, which asks for [{"id": 0, "scale": 0.5}] (others have scale 0) or nothing (None:
        the scales of the server). None when the server has no adapters. Raises HTTPError, ValidationError and
        ModelError for what is none of them, and for one twice."""
        if asked is None:
            return self.loras or None
        scales: dict[int, float] = {}
        for adapter in map(Adapter.model_validate, asked):
            if not 0 <= adapter.id < len(self.loras):
                raise HTTPError(400, f"there is no adapter {adapter.id}")
            if adapter.id in scales:  # a list of the same one has no end, and some are read while other texts wait
                raise HTTPError(400, f"adapter {adapter.id} is asked for twice")
            scales[adapter.id] = adapter.scale
        return tuple(checked([(lora, scales.get(i, 0.0)) for i, (lora, _) in enumerate(self.loras)])) or None

    @property
    def file_type(self) -> str:
        """The type of the model's weights, as `pyggml quantize` names it."""
        return file_type_name(self.model.kv.get("general.file_type")) or "unknown"

    @cached_property
    def template_caps(self) -> dict[str, bool]:
        """What the chat template can do."""
        return abilities(self.template, self.model.vocab)

    # -- requests ---------------------------------------------------------------------------------------------------

    async def read(self, request: Request, kind: Callable[[dict[str, Any]], T]) -> T:
        """The body of a request, read by a schema."""
        given = await json_object(request, self.options.timeout)
        try:
            body = kind(given)
            if isinstance(body, TextBody):
                refuse(body)
            return body
        except Exception as e:
            raise of_request(e) from e

    async def prepared(self, make: Callable[[], T]) -> T:
        """The result of a function that may take long, which runs in a thread beside the event loop. Raises HTTPError
        for what the request is to blame for."""
        try:
            async with self._turns.turn(LENGTH.get()):
                return await run_in_threadpool(make)
        except Exception as e:
            raise of_request(e) from e

    async def begun(self, body: TextBody, make: Callable[[], Sequence[Generation]]) -> Answering:
        """The generations that `make` prepares for a request, handed to the engine."""
        return self.submit(body, await self.prepared(make))

    def submit(self, body: TextBody, generations: Sequence[Generation]) -> Answering:
        """Hand the generations of a request to the engine."""
        return self.thread.submit(generations, bool(body.stream and body.return_progress))

    def params(self, body: TextBody) -> TextParams:
        """How a request wants its text. Raises SamplerError for values out of range."""
        return sampling(body, self.options.defaults, self.model.vocab)

    def generations(
        self,
        body: TextBody,
        prompts: Sequence[Sequence[int]],
        params: TextParams,
        n_probs: int | None,
        kind: type[Generation] = Generation,
        n: int | None = None,
        processors: Callable[[], Sequence[LogitsProcessor]] = tuple,
        media: Sequence[PlacedMedia | None] = (),
    ) -> list[Generation]:
        """`n` generations of each prompt. `processors` makes what changes the logits of one of them. `media`: what
        each prompt has of pictures and sounds, if any prompt has; then nothing is guessed, and nothing dropped. Raises
        HTTPError for a prompt that does not fit, and what a chain raises."""
        if not self.n_slot:
            raise HTTPError(501, "This server continues no texts: its model, or its options, are for embeddings")
        n = whole("n", (body.n or 1) if n is None else n, 1, limits.REQUEST_TEXTS)
        check_number(len(prompts) * n)
        _check_options(params, len(prompts) * n)
        self.thread.check_room(len(prompts) * n)  # before grammars are compiled
        loras = self.adapters(body.lora)
        made: list[Generation] = []
        for ids, seen in zip_longest(prompts, media):
            self._check(ids)
            source, prompt = source_and_prompt(self.model, list(ids))
            for i in range(n):
                seed = params.seed if params.seed is None or params.seed < 0 else params.seed + i
                text = TextRequest(prompt, replace(params, seed=seed), source, n_probs, processors(), kind=kind)
                text = replace(text, reuses=body.cache_prompt is not False, stopping=self._stopping(body), loras=loras)
                n_cells = self.n_slot if params.n_predict < 0 else min(self.n_slot, len(prompt) + params.n_predict)
                n_cells = max(n_cells, len(prompt))
                long = None if seen is not None else self._long(body, len(prompt), n_cells)
                text = replace(text, long=long, wants_seq=self._slot(body), media=seen)
                ctx = self.thread.ctx
                assert ctx is not None
                g = text.start(ctx, n_cells)
                made.append(g if seen is not None else self._with_guesses(g, params))
        return made

    def _long(self, body: TextBody, n_prompt: int, n_cells: int) -> LongContext | None:
        """What makes room in a slot that is full."""
        ctx = self.thread.ctx
        if not self.options.context_shift or ctx is None or self.model.decoder_start is not None:
            return None
        asked = self.options.n_keep if body.n_keep is None else whole("n_keep", body.n_keep, -1)
        n_keep = tokens_to_keep(asked, n_prompt, self.model.vocab.add_bos)
        n_discard = whole("n_discard", body.n_discard or 0, 0)
        return LongContext(ctx, min(n_keep, self.n_slot - 4), n_discard, n_cells=n_cells)

    def _slot(self, body: TextBody) -> int | None:
        """The slot that a request asks for."""
        if body.id_slot is None or body.id_slot < 0:
            return None
        return whole("id_slot", body.id_slot, 0, self.options.n_parallel - 1)

    def check_tokens(self, ids: Sequence[int]) -> None:
        """Raises HTTPError for a token that the vocabulary does not have."""
        n_vocab = self.model.hparams.n_vocab
        if bad := next((t for t in ids if not 0 <= t < n_vocab), None):
            raise HTTPError(400, f"token {bad} is none of the {n_vocab} of the vocabulary")

    def _check(self, ids: Sequence[int]) -> None:
        if not ids:
            raise HTTPError(400, "the prompt is empty")
        if len(ids) >= self.n_slot:
            raise too_long(len(ids), self.n_slot)
        self.check_tokens(ids)

    def _stopping(self, body: TextBody) -> Sequence[StoppingCriteria]:
        found: list[StoppingCriteria] = []
        if (ms := body.t_max_predict_ms or 0) > 0:
            found.append(_time_limit(self, ms))
        if (n := body.n_indent or 0) > 0:
            found.append(_indentation(self, n))
        return found

    # -- prompts ----------------------------------------------------------------------------------------------------

    def prompts(self, given: Any, add_special: bool = True) -> list[list[int]]:
        """The tokens of one prompt or several: text, tokens, a list that mixes the two, {"prompt_string": text}, or a
        list of these. `add_special`: with the tokens that the vocabulary puts around a text."""
        if isinstance(given, list):
            items = cast("list[Any]", given)
            if any(isinstance(x, int) for x in items) or not items:
                return [self._mixed(items, add_special)]
            found: list[list[int]] = []
            for item in items:
                found += self.prompts(item, add_special)
                check_number(len(found))
            return found
        if isinstance(given, dict):
            members = cast("dict[str, Any]", given)
            if members.get("multimodal_data"):
                raise HTTPError(501, "multimodal_data: only /completion takes pictures and sounds besides a text")
            given = members.get("prompt_string")
        if not isinstance(given, str):
            raise HTTPError(400, "prompt must be text, tokens, or a list of them")
        return [self.model.tokenize(given, add_special, True)]

    def _mixed(self, items: Sequence[Any], add_special: bool) -> list[int]:
        ids: list[int] = []
        for i, item in enumerate(items):
            if isinstance(item, str):
                ids += self.model.tokenize(item, add_special and i == 0, True)
            elif isinstance(item, int) and not isinstance(item, bool):
                ids.append(item)
            else:
                raise HTTPError(400, f"prompt: a list has texts and tokens, not {item!r:.60}")
        return ids

    # -- answers ----------------------------------------------------------------------------------------------------

    async def answered(self, request: Request, answering: Answering, answer: Awaitable[T]) -> T:
        """An answer that is made of all tokens; they end when the client leaves."""
        try:
            return await until_gone(request, answer)
        finally:
            answering.close()

    def stream(
        self,
        answering: Answering,
        events: AsyncIterator[bytes],
        failed: Callable[[HTTPError], bytes] = lambda e: event(e.json),
        ping: int | None = None,
    ) -> EventStream:
        """An answer in parts, as tokens come. `ping`: seconds between signs of life, when a request says them."""
        ping = self.options.sse_ping_interval if ping is None else ping
        return EventStream(events, answering.close, ping, self.options.timeout, failed)

    def usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The tokens of answers to one prompt or several; a prompt counts once."""
        prompts = {id(g.prompt): g for g in generations}.values()
        n_prompt, n = sum(g.n_prompt for g in prompts), sum(len(g.ids) for g in generations)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n,
            "total_tokens": n_prompt + n,
            "prompt_tokens_details": {"cached_tokens": sum(g.n_past for g in prompts)},
        }


def check_number(n: int) -> None:
    """Raises HTTPError when a request has no texts, or too many."""
    if not 0 < n <= limits.REQUEST_TEXTS:
        raise HTTPError(400, f"a request has 1 to {limits.REQUEST_TEXTS} texts, not {n}")


def _check_options(params: TextParams, n: int) -> None:
    """Raises HTTPError when long options are to be read for too many texts: each has stop strings, a grammar and biases
    of its own."""
    most = limits.REQUEST_BYTES // n
    values = (params.stop, params.grammar, params.json_schema, params.dry_sequence_breakers, params.logit_bias)
    if sum(size(value, most) for value in values) > most:
        raise HTTPError(400, f"the options of {n} texts have more than {limits.REQUEST_BYTES} characters together")


def service_of(request: Request) -> Service:
    """The service that a request came to."""
    return request.app.state.service


def progress(g: Generation) -> dict[str, Any]:
    """How much of a prompt is evaluated, by llama-server's names."""
    ms = (time.perf_counter() - g.began) * 1e3
    return {"total": len(g.prompt), "cache": g.n_past, "processed": g.n_done, "time_ms": ms}


def timings(g: Generation) -> dict[str, Any]:
    """The times of a text, by llama-server's names."""
    t = g.timings
    parts = {"prompt": (t.n_prompt, t.prompt), "predicted": (len(g.ids), t.eval + t.sample)}
    shown: dict[str, Any] = {"cache_n": g.n_past}
    if g.draft_stats is not None:
        shown |= {"draft_n": g.draft_stats.n_drafted, "draft_n_accepted": g.draft_stats.n_accepted}
    for name, (n, seconds) in parts.items():
        shown |= {
            f"{name}_n": n,
            f"{name}_ms": seconds * 1e3,
            f"{name}_per_token_ms": seconds * 1e3 / n if n else 0.0,
            f"{name}_per_second": n / seconds if seconds > 0 else 0.0,
        }
    return shown


def _time_limit(service: Service, ms: int) -> StoppingCriteria:
    """Ends a text that has a new line and takes longer than this since its first token."""
    vocab, begun, lines = service.model.vocab, list[float](), list[bool]()

    def stop(ids: np.ndarray, logits: Floats) -> bool:
        now = time.monotonic()
        if not begun:
            begun.append(now)
        if not lines and b"\n" in vocab.token_to_piece(int(ids[-1])):
            lines.append(True)
        return bool(lines) and (now - begun[0]) * 1e3 > ms

    return stop


def _indentation(service: Service, n: int) -> StoppingCriteria:
    """Ends a text when a line after its first begins with fewer than `n` spaces or tabs, and something else."""
    vocab, text = service.model.vocab, bytearray()

    def stop(ids: np.ndarray, logits: Floats) -> bool:
        text.extend(vocab.token_to_piece(int(ids[-1])))
        lines = bytes(text).split(b"\n")[1:]
        del text[: max(text.rfind(b"\n"), 0)]
        return any(len(x) - len(x.lstrip(b" \t")) < n and x.strip() for x in lines)

    return stop
