"""`Model.create_completion`: a text that continues a prompt."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pyggml.errors import SamplerError, whole
from pyggml.types import Floats

from ..generate.engine import Pending, Placed
from ..generate.generation import Generation, Token, until_end
from ..loaded import LoadedModel
from .request import SamplingRequest, finish, new_id, now, piece, started, usage
from .types import Completion, CompletionLogprobs

if TYPE_CHECKING:
    from typing_extensions import Unpack


def create_completion(
    model: LoadedModel,
    /,
    prompt: str | Sequence[int],
    suffix: str | None = None,
    max_tokens: int | None = 16,
    logprobs: int | None = None,
    echo: bool = False,
    stream: bool = False,
    *,
    name: str | None = None,
    **request: Unpack[SamplingRequest],
) -> Completion | Iterator[Completion]:
    """The text that follows a prompt, in the shape of OpenAI's completions; with `stream` an iterator of parts.

    max_tokens  None or 0: until the context is full
    logprobs    for each token, give the probabilities of this many alternatives
    echo        put the prompt before the text
    suffix      a text that is to follow the generated one
    name        the name of the model in the answer
    request     how tokens are chosen, by OpenAI's names, see `SamplingRequest`

    Raises what `Model.stream` raises.
    """
    if logprobs is not None:
        whole("logprobs", logprobs, 0, error=SamplerError)
    text = prompt if isinstance(prompt, str) else model.detokenize(prompt)
    ids = prompt if suffix is None else model.vocab.infill_ids(text, suffix)
    g = started(model, ids, max_tokens, logprobs, request)
    if echo and logprobs is not None and not g.source:
        g = _Echoed(**{f.name: getattr(g, f.name) for f in fields(g) if f.init})
    parts = _parts(model, g, logprobs, name or model.path, text, echo, suffix if echo else None)
    if stream:
        return parts
    return _joined(list(parts), g)


def _parts(
    model: LoadedModel, g: Generation, logprobs: int | None, name: str, before: str, echo: bool, after: str | None
) -> Iterator[Completion]:
    """The answer in parts; the last part says why it ended. Text that may still become a stop string is held back until
    a later token settles that. Offsets count from the beginning of the prompt, with or without `echo`."""
    id, created, offset = new_id("cmpl"), now(), len(before)
    text = before if echo else ""
    echoed: CompletionLogprobs | None = None
    for token in until_end(g):
        if isinstance(g, _Echoed) and g.tokens:
            echoed, g.tokens = _of_prompt(model, g.tokens, before), []
        text += token.text
        shown, echoed = echoed, None
        if logprobs is not None and token.finish_reason != "eog" and token.id >= 0:
            own = _logprobs(model, token, offset)
            offset += len(own["tokens"][0])
            shown = own if shown is None else _together([shown, own])
        reason = finish(token)
        if reason is not None and after is not None:
            text += after
        if text or shown is not None or reason is not None:
            yield _completion(id, created, name, text, shown, reason)
        text = ""


def _completion(
    id: str, created: int, name: str, text: str, shown: CompletionLogprobs | None, reason: Any
) -> Completion:
    return {
        "id": id,
        "object": "text_completion",
        "created": created,
        "model": name,
        "choices": [{"text": text, "index": 0, "logprobs": shown, "finish_reason": reason}],
    }


def _joined(parts: Sequence[Completion], g: Generation) -> Completion:
    choices = [p["choices"][0] for p in parts if "choices" in p]
    shown = [c["logprobs"] for c in choices if c["logprobs"] is not None]
    whole: CompletionLogprobs | None = None
    if shown or g.n_probs is not None:
        whole = _together(shown)
    answer = Completion(**parts[-1])
    text = "".join(c["text"] for c in choices)
    reason = choices[-1]["finish_reason"]
    answer["choices"] = [{"text": text, "index": 0, "logprobs": whole, "finish_reason": reason}]
    answer["usage"] = usage(g)
    return answer


def _together(shown: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    return {
        "text_offset": [x for s in shown for x in s["text_offset"]],
        "token_logprobs": [x for s in shown for x in s["token_logprobs"]],
        "tokens": [x for s in shown for x in s["tokens"]],
        "top_logprobs": [x for s in shown for x in s["top_logprobs"]],
    }


_ROWS = 64  # tokens of a prompt whose logits are held at once


class _Echoed(Generation):
    """A generation that also tells how likely each token of its prompt was. `tokens` has the tokens of the prompt; the
    first has no log-probability."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tokens: list[Token] = []

    def _part(self, tokens: Sequence[int]) -> Generator[Pending, Floats, Floats]:
        """Evaluate the first tokens of a part of the prompt, with the logits of each."""
        at, n = self.n_done, min(len(tokens), _ROWS, self.ctx.n_batch)
        rows = yield Placed(tokens[:n], range(at, at + n), (0,) * n, n)
        if at == 0:
            self.tokens.append(Token("", self.prompt[0]))
        following = self.prompt[at + 1 : at + n + 1]
        self.tokens += [self._record("", token, row) for token, row in zip(following, rows, strict=False)]
        return rows


def _of_prompt(model: LoadedModel, tokens: Sequence[Token], text: str) -> CompletionLogprobs:
    """The log-probabilities of a prompt, as llama-cpp-python gives them. The bos token is left out, and the first of
    the other tokens has no log-probability."""
    tokens = tokens[tokens[0].id == model.vocab.bos :]
    shown = [_logprobs(model, t, 0) for t in tokens]
    if not shown:
        return _together([])
    added = shown[0]["tokens"][0].startswith(" ") and not text.startswith(" ")  # the vocabulary did
    at = -int(added)
    for entry in shown:
        entry["text_offset"] = [max(at, 0)]
        at += len(entry["tokens"][0])
    shown[0]["token_logprobs"], shown[0]["top_logprobs"] = [None], [None]
    return _together(shown)


def _logprobs(model: LoadedModel, token: Token, offset: int) -> CompletionLogprobs:
    def text(i: int) -> str:
        return piece(model, i).decode("utf-8", "replace")

    top = {text(i): x for i, x in token.top}
    if token.logprob is not None:
        top.setdefault(text(token.id), token.logprob)
    return {
        "text_offset": [offset],
        "token_logprobs": [token.logprob],
        "tokens": [text(token.id)],
        "top_logprobs": [top],
    }
