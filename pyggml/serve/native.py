"""llama-server's own endpoints for texts: /completion and /infill."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from math import exp
from typing import Any, cast

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from pyggml import limits
from pyggml.llm.generate.engine import Token
from pyggml.llm.generate.generation import AfterSamplers, Generation
from pyggml.llm.media_prompt import PlacedMedia
from pyggml.llm.openai.request import piece
from pyggml.llm.samplers import TextParams
from pyggml.llm.samplers.params import OPTIONS

from .engine_thread import Answering, is_progress
from .errors import HTTPError
from .http import event
from .long_json import long_json, size
from .media import check_media, with_marks
from .schemas import NativeBody
from .service import Service, check_number, progress, service_of, timings

_SHOWN = 1 << 14  # characters of an option that answers repeat
_STOP_TYPES = {"eog": "eos", "stop": "word", "length": "limit", None: "none"}
Prompts = Sequence[tuple[Sequence[int], PlacedMedia | None]]  # tokens, and what they are of pictures and sounds


async def completion(request: Request) -> Response:
    """POST /completion."""
    service = service_of(request)
    return await _answered(request, service, await service.read(request, NativeBody.model_validate), _prompts)


async def infill(request: Request) -> Response:
    """POST /infill."""
    service = service_of(request)
    return await _answered(request, service, await service.read(request, NativeBody.model_validate), _infill_prompt)


def _prompts(service: Service, body: NativeBody) -> Prompts:
    if body.prompt is None:
        raise HTTPError(400, '"prompt" must be provided')
    given: Any = body.prompt
    items = cast("list[Any]", given) if isinstance(given, list) else [given]
    if not any(map(_has_media, items)):
        return [(ids, None) for ids in service.prompts(given)]
    check_number(len(items))
    data: list[Any] = [item["multimodal_data"] for item in items if _has_media(item)]
    check_media(sum(len(cast("list[Any]", x)) for x in data if isinstance(x, list)))
    found: list[tuple[Sequence[int], PlacedMedia | None]] = []
    for item in items:
        found += [with_marks(service, item)] if _has_media(item) else [(i, None) for i in service.prompts(item)]
    return found


def _has_media(item: Any) -> bool:
    return isinstance(item, dict) and bool(cast("dict[str, Any]", item).get("multimodal_data"))


def _infill_prompt(service: Service, body: NativeBody) -> Prompts:
    """The prompt of a text between two others, with other files before it. What is too long is cut: the prefix at its
    beginning, the suffix at its end, other files first."""
    if body.input_prefix is None or body.input_suffix is None:
        missing = "input_prefix" if body.input_prefix is None else "input_suffix"
        raise HTTPError(400, f'"{missing}" is required')
    if body.prompt is not None and not isinstance(body.prompt, str):
        raise HTTPError(400, '"prompt" must be a string')
    vocab = service.model.vocab
    if None in (vocab.fim_pre, vocab.fim_suf, vocab.fim_mid):
        raise HTTPError(501, "Infill is not supported by this model: its vocabulary has no tokens for it")
    extra: list[int] = []
    for file in body.input_extra or ():
        name, text = file.get("filename", "tmp"), file.get("text")
        if not isinstance(name, str) or not isinstance(text, str):
            raise HTTPError(400, "input_extra: a file has a text and a filename")
        if vocab.fim_sep is None:
            extra += vocab.tokenize(text, False)
        else:
            extra += [vocab.fim_sep, *vocab.tokenize(f"{name}\n{text}", False)]
    if vocab.fim_rep is not None and extra:
        extra = [vocab.fim_rep, *vocab.tokenize("myproject\n", False), *extra]
    ids = vocab.infill_ids(body.input_prefix, body.input_suffix)
    ids += vocab.tokenize(body.prompt or "", False)
    room = service.n_slot - len(ids) - max(body.given.get("n_predict", 0), 1)
    n_before = len(vocab.before)
    extra = extra[-room:] if 0 < room < len(extra) else extra if room > 0 else []
    return [([*ids[:n_before], *extra, *ids[n_before:]], None)]


async def _answered(
    request: Request, service: Service, body: NativeBody, prompts: Callable[[Service, NativeBody], Prompts]
) -> Response:
    if len(body.response_fields or ()) > (most := limits.RESPONSE_FIELDS):
        raise HTTPError(400, f"response_fields: at most {most} names, which are looked for in each answer")
    n_probs = body.n_probs if body.n_probs else None
    n = body.n if body.n_cmpl is None else body.n_cmpl
    kind = AfterSamplers if body.post_sampling_probs and n_probs is not None else Generation

    def begin() -> list[Generation]:
        ids, media = zip(*prompts(service, body), strict=True)
        n_each = 1 if n is None else n
        return service.generations(body, ids, service.params(body), n_probs, kind, n_each, media=media)

    answering = await service.begun(body, begin)
    first = cast("TextParams", answering.generations[0].chain.params)
    shown = settings(first, bool(body.stream), body.n_probs or 0)
    answers = [_Answer(service, body, g, i, shown) for i, g in enumerate(answering.generations)]
    if body.stream:
        return service.stream(answering, _events(answering, answers), ping=body.sse_ping_interval)
    return await long_json(await service.answered(request, answering, _whole(answering, answers)))


async def _whole(answering: Answering, answers: Sequence[_Answer]) -> Any:
    async for i, token in answering:
        answers[i].take(token)
    whole = await run_in_threadpool(lambda: [a.last() for a in answers])  # each spells its prompt
    return whole if len(whole) > 1 else whole[0]


async def _events(answering: Answering, answers: Sequence[_Answer]) -> AsyncIterator[bytes]:
    async for i, token in answering:
        answer = answers[i]
        if is_progress(token):
            yield event(answer.progress())
            continue
        answer.take(token)
        if (part := answer.part(token)) is not None:
            yield event(part)
        if token.finish_reason is not None:
            yield event(answer.last())


class _Answer:
    """Makes the answer to one prompt. `shown`: the options of the first one, from which its own differ by the seed."""

    def __init__(self, service: Service, body: NativeBody, g: Generation, index: int, shown: Mapping[str, Any]) -> None:
        self._service, self._body, self._g, self._index, self._shown = service, body, g, index, shown
        self._text, self._tokens, self._probs = "", list[int](), list[dict[str, Any]]()
        self._n = 0  # tokens so far: the engine may be further

    def take(self, token: Token) -> None:
        """Read a token."""
        self._text += token.text
        self._n += token.id >= 0
        if token.id >= 0 and token.finish_reason != "eog":
            self._tokens.append(token.id)
            if token.logprob is not None:
                own = self._probability(token.id, token.logprob)
                top = "top_probs" if self._body.post_sampling_probs else "top_logprobs"
                self._probs.append({**own, top: [self._probability(i, x) for i, x in token.top]})

    def part(self, token: Token) -> dict[str, Any] | None:
        """What can be shown now; None when a character is not whole yet."""
        if not token.text:
            return None
        shown: dict[str, Any] = {
            "index": self._index,
            "content": self._text,
            "tokens": self._tokens,
            "stop": False,
            "id_slot": self._g.seq,
            "tokens_predicted": self._n,
            "tokens_evaluated": self._g.n_prompt,
        }
        if self._body.timings_per_token:
            shown["timings"] = timings(self._g)
        if self._probs:
            shown["completion_probabilities"] = self._probs
        self._text, self._tokens, self._probs = "", [], []
        return shown

    def progress(self) -> dict[str, Any]:
        """How much of the prompt is evaluated."""
        g = self._g
        none: dict[str, Any] = {"index": self._index, "content": "", "tokens": [], "stop": False, "id_slot": g.seq}
        return {**none, "tokens_predicted": 0, "tokens_evaluated": g.n_prompt, "prompt_progress": progress(g)}

    def last(self) -> dict[str, Any]:
        """The whole answer, or the end of a stream."""
        g, service, body = self._g, self._service, self._body
        text = service.model.detokenize(g.ids)
        by_criteria = g.finish_reason == "stop" and not g.stop_string  # a time, or an indentation
        shown: dict[str, Any] = {
            "index": self._index,
            "content": self._text,
            "tokens": self._tokens if body.return_tokens else [],
            "id_slot": g.seq,
            "stop": True,
            "model": service.name,
            "tokens_predicted": len(g.ids),
            "tokens_evaluated": g.n_prompt,
            "generation_settings": self._settings(),
            "prompt": service.model.detokenize(g.source or g.prompt, unparse_special=True),
            "has_new_line": "\n" in text,
            "truncated": g.long is not None and g.long.n_dropped > 0,
            "stop_type": "limit" if by_criteria else _STOP_TYPES[g.finish_reason],
            "stopping_word": g.stop_string,
            "tokens_cached": g.n_done,
            "timings": timings(g),
        }
        if self._probs and not body.stream:
            shown["completion_probabilities"] = self._probs
        return shown if not body.response_fields else _fields(shown, body.response_fields)

    def _settings(self) -> dict[str, Any]:
        body, options = self._body, self._service.options
        loras = self._g.loras or ()
        return {
            **self._shown,
            "seed": _seed(cast("TextParams", self._g.chain.params)),
            "n_keep": options.n_keep if body.n_keep is None else body.n_keep,
            "n_discard": body.n_discard or 0,
            "timings_per_token": bool(body.timings_per_token),
            "post_sampling_probs": bool(body.post_sampling_probs),
            "lora": [{"id": i, "scale": scale} for i, (_, scale) in enumerate(loras)],
        }

    def _probability(self, token: int, logprob: float) -> dict[str, Any]:
        data = piece(self._service.model, token)
        shown = {"id": token, "token": data.decode("utf-8", "replace"), "bytes": list(data)}
        return shown | ({"prob": exp(logprob)} if self._body.post_sampling_probs else {"logprob": logprob})


def settings(params: TextParams, stream: bool = False, n_probs: int = 0) -> dict[str, Any]:
    """The options of a text, by llama-server's names; null in the place of a long one: each answer of a request would
    repeat it, and each look at the slots."""
    values: dict[str, Any] = {o.other_name or name: getattr(params, name) for name, o in OPTIONS.items()}
    long = {name for name, value in values.items() if size(value, _SHOWN) > _SHOWN}
    del values["lookup"]  # llama-server has none
    values |= {"n_predict": params.n_predict, "mirostat": values.pop("mirostat_mode"), "samplers": list(params.order)}
    values |= {"seed": _seed(params), "stop": list(params.stops)}
    values |= {"dry_sequence_breakers": list(params.dry_sequence_breakers), "grammar": params.grammar or ""}
    values |= {"logit_bias": [[i, x if abs(x) < 1e300 else False] for i, x in params.logit_bias.items()]}
    values |= dict.fromkeys(long)
    return {**_SETTINGS, **values, "max_tokens": params.n_predict, "stream": stream, "n_probs": n_probs}


def _seed(params: TextParams) -> int:
    return 0xFFFFFFFF if params.seed is None else params.seed


# Members of a text's options that llama-server names, with their values where no request says otherwise.
_SETTINGS: dict[str, Any] = {
    "n_keep": 0,
    "n_discard": 0,
    "timings_per_token": False,
    "post_sampling_probs": False,
    "lora": [],
    "chat_format": "Content-only",
    "reasoning_format": "none",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "grammar_lazy": False,
    "grammar_triggers": [],
    "preserved_tokens": [],
    "backend_sampling": False,
    "speculative.types": "none",
}


def _fields(shown: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The members that are asked for; of one with slashes, what is at the end of its path, by the name of the path."""
    found: dict[str, Any] = {}
    for name in names:
        value: Any = shown
        for key in name.split("/"):
            value = value.get(key, shown) if isinstance(value, dict) else shown  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if value is not shown:
            found[name] = value
    return found
