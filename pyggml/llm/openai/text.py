"""`Model.create_completion`: a text that continues a prompt."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from pyggml.errors import SamplerError, whole
from pyggml.types import Floats

from ..generate.engine import Pending, Placed
from ..generate.generation import Generation, Token
from ..generate.kept import KeptContext, begin
from ..loaded import LoadedModel
from .request import SamplingRequest, asked_for, finish, new_id, now, piece, usage
from .types import Completion, CompletionLogprobs, FinishReason

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
    kept: KeptContext | None = None,
    **request: Unpack[SamplingRequest],
) -> Completion | Iterator[Completion]:
    """The text that follows a prompt, in the shape of OpenAI's completions; with `stream` an iterator of parts.

    max_tokens  None or 0: until the context is full
    logprobs    for each token, give the probabilities of this many alternatives
    echo        put the prompt before the text
    suffix      a text that is to follow the generated one
    name        the name of the model in the answer
    kept        a context that stays for the next request; None: a context for this one alone
    request     how tokens are chosen, by OpenAI's names, see `SamplingRequest`

    Raises what `Model.stream` raises.
    """
    if logprobs is not None:
        whole("logprobs", logprobs, 0, error=SamplerError)
    text = prompt if isinstance(prompt, str) else model.detokenize(prompt)
    ids = prompt if suffix is None else model.vocab.infill_ids(text, suffix)
    asked, own = asked_for(model, ids, max_tokens, logprobs, request, kind_of(model, echo, logprobs))
    g, tokens = begin(model, asked, own, kept)
    answer = CompletionAnswer(g, name or model.path, text, echo, suffix)
    parts = (part for token in tokens for part in answer.parts(token))
    if stream:
        return parts
    return answer.joined(list(parts))


def kind_of(model: LoadedModel, echo: bool, logprobs: int | None) -> type[Generation]:
    """The class of generation that knows what an answer shows: with `echo` and `logprobs` how likely the prompt was."""
    return _Echoed if echo and logprobs is not None and model.decoder_start is None else Generation


class CompletionAnswer:
    """Makes an answer of the tokens of a generation, whole or in parts.

    before  the prompt as text; with `echo` it is shown first, and `suffix` last
    index   which of several answers it is

    The last part says why the text ended. Text that may still become a stop string is held back until a later token
    settles that. Offsets count from the beginning of the prompt, with or without `echo`.
    """

    def __init__(
        self,
        g: Generation,
        name: str,
        before: str = "",
        echo: bool = False,
        suffix: str | None = None,
        index: int = 0,
        id: str | None = None,
    ) -> None:
        self.g, self._name, self._before, self._index = g, name, before, index
        self._after = suffix if echo else None
        self._id, self._created, self._offset = id or new_id("cmpl"), now(), len(before)
        self._text = before if echo else ""

    def parts(self, token: Token) -> list[Completion]:
        """The parts that can be shown after a token: one, or none yet."""
        g, model = self.g, self.g.ctx.model
        shown: CompletionLogprobs | None = None
        if isinstance(g, _Echoed) and g.tokens:
            shown, g.tokens = _of_prompt(model, g.tokens, self._before), []
        text = self._text + token.text
        if g.n_probs is not None and token.finish_reason != "eog" and token.id >= 0:
            own = _logprobs(model, token, self._offset)
            self._offset += len(own["tokens"][0])
            shown = own if shown is None else _together([shown, own])
        reason = finish(token.finish_reason)
        if reason is not None and self._after is not None:
            text += self._after
        self._text = ""
        return [self._part(text, shown, reason)] if text or shown is not None or reason is not None else []

    def joined(self, parts: Sequence[Completion]) -> Completion:
        """The whole answer, given all its parts."""
        choices = [p["choices"][0] for p in parts if "choices" in p]
        shown = [c["logprobs"] for c in choices if c["logprobs"] is not None]
        whole = _together(shown) if shown or self.g.n_probs is not None else None
        answer = self._part("".join(c["text"] for c in choices) or self._text, whole, finish(self.g.finish_reason))
        answer["usage"] = usage(self.g)
        return answer

    def _part(self, text: str, shown: CompletionLogprobs | None, reason: FinishReason | None) -> Completion:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._name,
            "choices": [{"text": text, "index": self._index, "logprobs": shown, "finish_reason": reason}],
        }


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
        self.reuses = False  # every token of the prompt needs its logits

    def _part(self, tokens: Sequence[int]) -> Generator[Pending, Floats, Floats]:
        """Evaluate the first tokens of a part of the prompt, with the logits of each."""
        at, n = self.n_done, min(len(tokens), _ROWS, self.ctx.n_batch)
        rows = yield Placed(tokens[:n], range(at, at + n), (self.seq,) * n, n)
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
