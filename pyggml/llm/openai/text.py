"""`Model.create_completion`: a text that continues a prompt."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from pyggml import limits
from pyggml.errors import SamplerError, whole
from pyggml.types import Floats

from ..generate.engine import Pending, Placed
from ..generate.generation import Generation, OwnContext, TextRequest, Token
from ..generate.kept import KeptContext, begin, begin_several, several
from ..loaded import LoadedModel
from .request import SamplingRequest, asked_for, finish, new_id, now, piece, usage, usage_of, usage_wanted
from .types import Completion, CompletionLogprobs, FinishReason

if TYPE_CHECKING:
    from typing_extensions import Unpack


def create_completion(
    model: LoadedModel,
    /,
    prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]],
    suffix: str | None = None,
    max_tokens: int | None = 16,
    logprobs: int | None = None,
    echo: bool = False,
    stream: bool = False,
    *,
    n: int | None = None,
    best_of: int | None = None,
    stream_options: Mapping[str, Any] | None = None,
    name: str | None = None,
    kept: KeptContext | None = None,
    **request: Unpack[SamplingRequest],
) -> Completion | Iterator[Completion]:
    """The text that follows a prompt, in the shape of OpenAI's completions; with `stream` an iterator of parts.

    max_tokens  None or 0: until the context is full
    logprobs    for each token, give the probabilities of this many alternatives
    echo        put the prompt before the text
    suffix      a text that is to follow the generated one
    prompt      text, token ids, or a list of prompts, each of which gets its choices
    n           answers to each prompt, with seeds that follow each other
    best_of     make this many answers, and give the `n` whose tokens are likeliest on average
    stream_options  {"include_usage": True}: a last part, without choices, has the number of tokens
    name        the name of the model in the answer
    kept        a context that stays for the next request; None: a context for this one alone
    request     how tokens are chosen, by OpenAI's names, see `SamplingRequest`

    Raises what `Model.stream` raises.
    """
    if logprobs is not None:
        whole("logprobs", logprobs, 0, error=SamplerError)
    n = whole("n", 1 if n is None else n, 1, limits.REQUEST_TEXTS, SamplerError)
    n_made = n if best_of is None else whole("best_of", best_of, n, limits.REQUEST_TEXTS, SamplerError)
    if stream and n_made != n:
        raise SamplerError("best_of chooses among whole answers, which cannot be streamed")
    prompts = _prompts(prompt)
    with_usage = usage_wanted(stream_options)
    n_probs = 0 if logprobs is None and n_made != n else logprobs
    asked: list[tuple[TextRequest, str]] = []
    own: OwnContext = {}
    for each in prompts:
        text = each if isinstance(each, str) else model.detokenize(each)
        ids = each if suffix is None else model.vocab.infill_ids(text, suffix)
        found, own = asked_for(model, ids, max_tokens, n_probs, request, kind_of(model, echo, logprobs))
        asked += [(one, text) for one in several(found, n_made)]
    if len(asked) == 1:
        g, tokens = begin(model, asked[0][0], own, kept)
        generations, found_tokens = [g], ((0, token) for token in tokens)
    else:
        generations, found_tokens = begin_several(model, [text for text, _ in asked], own)
    id = new_id("cmpl")
    answers = [
        CompletionAnswer(g, name or model.path, before, echo, suffix, i, id)
        for i, (g, (_, before)) in enumerate(zip(generations, asked, strict=True))
    ]
    parts = ((i, part) for i, token in found_tokens for part in answers[i].parts(token))
    if stream:
        return _streamed(answers, (part for _, part in parts), n if with_usage else None)
    made: list[list[Completion]] = [[] for _ in answers]
    for i, part in parts:
        made[i].append(part)
    wholes = [answer.joined(p) for answer, p in zip(answers, made, strict=True)]
    if n_made != n:
        wholes = _best(wholes, generations, n, n_made, logprobs is not None)
    choices = [choice for answer in wholes for choice in answer.get("choices", ())]
    return {**wholes[0], "choices": choices, "usage": usage_of(generations, n_made)}


def _prompts(given: Any) -> list[str | Sequence[int]]:
    """The prompts of a request: one, or several."""
    if isinstance(given, (list, tuple)) and given and not isinstance(given[0], int):
        prompts = list(cast("Sequence[str | Sequence[int]]", given))
        if len(prompts) > limits.REQUEST_TEXTS:
            raise SamplerError(f"a request has up to {limits.REQUEST_TEXTS} prompts, not {len(prompts)}")
        return prompts
    return [given]


def _streamed(
    answers: Sequence[CompletionAnswer], parts: Iterator[Completion], n_each: int | None
) -> Iterator[Completion]:
    """The parts, and behind them the number of tokens when `n_each` answers were made of each prompt."""
    last: Completion | None = None
    for last in parts:
        yield last
    if n_each is not None and last is not None:
        yield {**last, "choices": [], "usage": usage_of([a.g for a in answers], n_each)}


def _best(
    wholes: Sequence[Completion], generations: Sequence[Generation], n: int, n_made: int, shown: bool
) -> list[Completion]:
    """Of each prompt's `n_made` answers the `n` whose tokens are likeliest on average."""

    def likelihood(i: int) -> float:
        logprobs = wholes[i].get("choices", [])[0]["logprobs"]
        of_text = [] if logprobs is None else logprobs["token_logprobs"][-len(generations[i].ids) or None :]
        known = [x for x in of_text if x is not None]
        return sum(known) / len(known) if known else 0.0

    best: list[Completion] = []
    for first in range(0, len(wholes), n_made):
        best += [wholes[i] for i in sorted(range(first, first + n_made), key=likelihood, reverse=True)[:n]]
    for index, answer in enumerate(best):
        choice = answer.get("choices", [])[0]
        choice["index"] = index
        if not shown:
            choice["logprobs"] = None
    return best


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
