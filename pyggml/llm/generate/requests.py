"""Answers many requests, each with its own options: they are evaluated side by side and answered in their order."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from pyggml.errors import BatchError, GGMLError, whole
from pyggml.signature import hands_on
from pyggml.types import Floats

from ..loaded import LoadedModel
from ..options import SHORTER
from ..samplers import N_PREDICT, TEXT_KEYWORDS, TextOptions, TextParams, our_names, text_params
from ..samplers.params import OPTIONS
from .batched import NewContext, shared_context, together
from .engine import Token
from .generation import Generation, TextRequest, ids_of, source_and_prompt
from .media_chat import read_messages

if TYPE_CHECKING:
    from typing_extensions import Unpack


_TEXTS = 128  # how many texts are embedded at a time
_FIELDS = {"id", "input", "prompt", "messages", *OPTIONS}  # or `OTHER_NAMES` of them
Result = dict[str, Any]
Embed = Callable[[Sequence[Sequence[int]]], Floats]


class Read(Protocol):
    """A request of another form: the text that it asks for, and what makes its result of the text's tokens."""

    @property
    def text(self) -> TextRequest: ...
    @property
    def result(self) -> Callable[[Generation, Sequence[Token]], Result]: ...


Reader = Callable[[LoadedModel, int, Mapping[str, Any], set[str]], "Read | None"]  # see `read_line`


@dataclass(frozen=True)
class _Text:
    """A text to embed."""

    index: int
    ids: Sequence[int]


def _n_cells(r: TextRequest) -> int:
    return len(r.prompt) + r.params.n_predict


@hands_on(*TEXT_KEYWORDS)
def answer(
    model: LoadedModel,
    requests: Iterable[Any],
    new_context: NewContext,
    n_predict: int = N_PREDICT,
    vectors: Embed | None = None,
    reader: Reader | None = None,
    *,
    n_parallel: int = 32,
    **asked: Unpack[TextOptions],
) -> Iterator[Result]:
    """As `gg.batch`, in contexts that `new_context` makes. The model needs only a vocabulary. Requests with `input` are
    refused without `vectors`, which embeds token ids. `reader` reads requests of other forms."""
    _ = model.hparams  # refuses what was closed
    whole("n_parallel", n_parallel, 1, error=BatchError)
    defaults = text_params(n_predict, asked)
    if isinstance(requests, str | bytes | Mapping) or not isinstance(requests, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BatchError(f"requests must be a list of them, not {requests!r:.60}")
    results: list[Result] = []
    todo: list[TextRequest] = []
    texts: list[_Text] = []
    others: dict[int, Read] = {}
    seen: set[str] = set()
    for index, request in enumerate(requests):
        result: Result = {"index": index}
        if isinstance(request, Mapping):
            result |= {key: request[key] for key in ("id", "custom_id") if key in request}
        try:
            other = None
            if reader is not None and isinstance(request, Mapping):
                other = reader(model, index, cast("Mapping[str, Any]", request), seen)
            if other is not None:
                others[index] = other
                todo.append(other.text)
            elif isinstance(request, Mapping) and "input" in request:
                if vectors is None:
                    raise BatchError("a model in stages embeds nothing")
                texts.append(_text(model, index, cast("Mapping[str, Any]", request)))
            else:
                todo.append(_read(model, index, request, defaults))
        except Exception as e:
            result["error"] = _reason(e)
        results.append(result)
    embedded = iter(()) if vectors is None else _embedded(texts, results, vectors)
    return _in_order(
        results, _answers(todo, results, n_parallel, new_context, others), embedded, {t.index for t in texts}
    )


def _answers(
    todo: Sequence[TextRequest],
    results: list[Result],
    n_parallel: int,
    new_context: NewContext,
    others: Mapping[int, Read],
) -> Iterator[None]:
    """Fill in the results of texts that are continued; yields now and then."""
    if not todo:
        return
    ctx = shared_context(new_context, n_parallel, [(len(r.source), _n_cells(r)) for r in todo])

    def generations() -> Iterator[Generation]:
        for request in todo:
            try:
                g = request.start(ctx, _n_cells(request))
            except Exception as e:  # as for a grammar that cannot be read
                results[request.index]["error"] = _reason(e)
                continue
            yield g

    def failed(g: Generation, e: Exception) -> None:
        results[g.index]["error"] = _reason(e)

    texts: dict[int, list[Token]] = {}
    for g, token in together(ctx, generations(), failed):
        tokens = texts.setdefault(g.index, [])
        tokens.append(token)
        if token.finish_reason is not None:
            del texts[g.index]
            other = others.get(g.index)
            results[g.index] |= _result(g, tokens) if other is None else other.result(g, tokens)
        yield


def _result(g: Generation, tokens: Sequence[Token]) -> Result:
    """The result of a text that is continued."""
    made = {"text": "".join(t.text for t in tokens), "finish_reason": tokens[-1].finish_reason}
    return {**made, "n_prompt": g.n_prompt, "n_predicted": len(g.ids)}


def _embedded(texts: Sequence[_Text], results: list[Result], vectors: Embed) -> Iterator[None]:
    """Fill in the results of texts that are embedded; yields now and then."""
    for i in range(0, len(texts), _TEXTS):
        part = texts[i : i + _TEXTS]
        try:
            for t, row in zip(part, vectors([t.ids for t in part]), strict=True):
                results[t.index] |= {"embedding": row.tolist(), "n_prompt": len(t.ids)}
        except GGMLError as e:  # a model that embeds nothing
            for t in part:
                results[t.index]["error"] = _reason(e)
        yield


def _in_order(
    results: Sequence[Result], answers: Iterator[None], embedded: Iterator[None], texts: Container[int]
) -> Iterator[Result]:
    for i, result in enumerate(results):
        while not {"text", "embedding", "response", "error"} & result.keys():
            next(embedded if i in texts else answers, None)  # its end fills in the last that could not begin
        yield result


def _text(model: LoadedModel, index: int, request: Mapping[str, Any]) -> _Text:
    """A request for an embedding. Raises BatchError when it has other fields, or no text that can be embedded."""
    if more := [key for key in request if key not in ("id", "input")]:
        raise BatchError(f"a request with an input has an id, if it likes, but no {more[0]!r:.60}")
    given, hp = request["input"], model.hparams
    ids = model.tokenize(given) if isinstance(given, str) else given
    if not isinstance(ids, Sequence):
        raise BatchError(f"an input must be text or token ids, not {given!r:.60}")
    ids = [whole("a token", t, 0, hp.n_vocab - 1, BatchError) for t in cast("Sequence[object]", ids)]
    if not 0 < len(ids) <= hp.n_ctx_train:
        raise BatchError(f"the input has {len(ids)} tokens; the model takes 1 to {hp.n_ctx_train}")
    return _Text(index, ids)


def _reason(e: Exception) -> str:
    """What is wrong with a request, in words, by the error that it raised. Every error ends its request alone, also an
    error that nobody thought of."""
    match e:
        case GGMLError():
            return str(e)
        case RecursionError():
            return "nested too deep"
        case MemoryError():
            return "there is not enough memory for this request"
        case _:
            return f"{type(e).__name__}: {e}"


def _read(model: LoadedModel, index: int, request: Any, defaults: TextParams) -> TextRequest:
    """A request, checked, with its prompt as tokens. Raises BatchError, SamplerError or ModelError."""
    if isinstance(request, GGMLError):
        raise request
    if not isinstance(request, Mapping):
        request = {"prompt": request}
    try:
        given = our_names(cast("Mapping[str, Any]", request))
    except TypeError as e:
        raise BatchError(str(e)) from None
    unknown = [key for key in given if key not in _FIELDS]
    if unknown:
        raise BatchError(f"a request has no field {unknown[0]!r:.60}; it may have {', '.join(sorted(_FIELDS))}")
    if ("prompt" in given) == ("messages" in given):
        raise BatchError("a request has either a prompt or messages")
    params = replace(defaults, **{k: v for k, v in given.items() if k in OPTIONS})
    if "messages" in given and model.decoder_start is not None:
        raise BatchError(f"{model.arch} is an encoder-decoder, which has no chat: a request has a prompt")
    if "messages" in given:
        prompt, media, stop = read_messages(model, given["messages"])
        params = replace(params, stop=(*stop, *params.stops))
    else:
        prompt, media = ids_of(model, given["prompt"]), None
    if not prompt:
        raise BatchError("the prompt is empty")
    if (high := max(prompt)) >= model.hparams.n_vocab:
        raise BatchError(f"token {high} is none of the {model.hparams.n_vocab} of the vocabulary")
    n_ctx = model.hparams.n_ctx_scaled
    if len(prompt) >= n_ctx:
        raise BatchError(f"the prompt has {len(prompt)} tokens; the model was trained for {n_ctx}: {SHORTER}")
    if params.n_predict == 0:
        raise BatchError("n_predict is 0: there is nothing to do")
    source, prompt = source_and_prompt(model, prompt)
    room = n_ctx - len(prompt)
    if not 0 <= params.n_predict <= room:
        params = replace(params, n_predict=room)
    return TextRequest(prompt, params, source, index=index, media=media)
