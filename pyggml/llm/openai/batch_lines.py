"""The lines of OpenAI's batch files, {"custom_id", "method", "url", "body"}: read, and answered by a model.

The server (`/v1/batches`) and `gg.batch` read them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from pyggml.errors import BatchError, SamplerError
from pyggml.small_file import HALF

from ..generate.engine import Token
from ..generate.generation import Generation, TextRequest, ids_of
from ..generate.requests import Result
from ..generate.text import stop_strings
from ..loaded import LoadedModel
from .chat import ChatAnswer, read_chat
from .request import asked_for, new_id
from .text import CompletionAnswer, kind_of

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
_HERE = ENDPOINTS[:2]  # those that `read_line` answers
_OF_CHAT = ("tools", "tool_choice", "response_format", "functions", "function_call")
_OF_TEMPLATE = ("chat_template", "chat_template_kwargs")


def why_not(line: Any, endpoints: Sequence[str], seen: set[str]) -> str:
    """What is wrong with a line; "" when nothing is. `seen`: the ids of other lines."""
    if not isinstance(line, dict):
        return "no JSON object"
    request = cast("dict[str, Any]", line)
    id = request.get("custom_id")
    if not isinstance(id, str) or id in seen or HALF.search(id):  # in an answer it would be another text
        return "custom_id: a text that no other line has"
    if request.get("method", "POST") != "POST" or request.get("url") not in endpoints:
        return f"method and url: POST {' or '.join(endpoints)}"
    body = request.get("body")
    if not isinstance(body, dict) or cast("dict[str, Any]", body).get("stream"):
        return "body: an object that asks for no stream"
    return ""


@dataclass(frozen=True)
class Line:
    """A request that was read: the text that it asks for, and what makes its result of the text's tokens."""

    text: TextRequest
    result: Callable[[Generation, Sequence[Token]], Result]


def read_line(model: LoadedModel, index: int, request: Mapping[str, Any], seen: set[str]) -> Line | None:
    """A line of OpenAI's, or a request with `messages` and `tools`; None for any other request. Without a `url` a line
    is a chat when its body has messages. Raises BatchError for a line that is wrong, and what
    `Model.create_chat_completion` raises."""
    if "custom_id" not in request:
        return _with_tools(model, index, request) if "tools" in request and "messages" in request else None
    body: Any = request.get("body")
    url = _HERE[0] if isinstance(body, dict) and "messages" in body else _HERE[1]
    if why := why_not({"url": url, **request}, _HERE, seen):
        raise BatchError(why)
    seen.add(request["custom_id"])
    options = {k: v for k, v in cast("dict[str, Any]", body).items() if v is not None and k not in ("model", "stream")}
    if options.pop("n", 1) != 1:
        raise BatchError("n: a line has one answer")
    name = str(cast("dict[str, Any]", body).get("model") or model.path)
    if request.get("url", url) == _HERE[0]:
        text, of_tokens = _chat(model, index, options, name)
    else:
        text, of_tokens = _completion(model, index, options, name)

    def result(g: Generation, tokens: Sequence[Token]) -> Result:
        response = {"status_code": 200, "request_id": new_id("req"), "body": of_tokens(g, tokens)}
        counts = {"n_prompt": g.n_prompt, "n_predicted": len(g.ids)}
        return {"custom_id": request["custom_id"], "response": response, "error": None, **counts}

    return Line(text, result)


def _with_tools(model: LoadedModel, index: int, request: Mapping[str, Any]) -> Line:
    """A chat with tools in a line of ours: the result has `tool_calls`, too."""
    options = {k: v for k, v in request.items() if k != "id"}
    text, of_tokens = _chat(model, index, options, model.path)

    def result(g: Generation, tokens: Sequence[Token]) -> Result:
        choice = of_tokens(g, tokens)["choices"][0]
        calls = choice["message"].get("tool_calls", [])
        made = {"text": choice["message"]["content"] or "", "finish_reason": choice["finish_reason"]}
        return {**made, "tool_calls": calls, "n_prompt": g.n_prompt, "n_predicted": len(g.ids)}

    return Line(text, result)


Answered = tuple[TextRequest, Callable[[Generation, Sequence[Token]], Any]]


def _chat(model: LoadedModel, index: int, options: dict[str, Any], name: str) -> Answered:
    of_chat = {k: options.pop(k) for k in (*_OF_CHAT, *_OF_TEMPLATE) if k in options}
    chat = read_chat(model, options.pop("messages", ()), **of_chat)
    n_probs = options.pop("top_logprobs", 0) if options.pop("logprobs", False) else None
    stop = (*chat.stop, *stop_strings(options.pop("stop", ()), SamplerError))
    options = {"temperature": 0.2, **options, **chat.constraint, "stop": stop}
    text = _bounded(model, chat.ids, options, n_probs)

    def answer(g: Generation, tokens: Sequence[Token]) -> Any:
        made = ChatAnswer(chat, g, name)
        for token in tokens:
            made.take(token)
        return made.whole()

    return replace(text, index=index, media=chat.media), answer


def _completion(model: LoadedModel, index: int, options: dict[str, Any], name: str) -> Answered:
    prompt, echo, logprobs = (
        options.pop("prompt", None),
        bool(options.pop("echo", False)),
        options.pop("logprobs", None),
    )
    if prompt is None:
        raise BatchError("body: a prompt is missing")
    options.setdefault("max_tokens", 16)
    ids = ids_of(model, prompt)
    text = _bounded(model, ids, options, logprobs, kind_of(model, echo, logprobs))
    before = prompt if isinstance(prompt, str) else model.detokenize(ids)

    def answer(g: Generation, tokens: Sequence[Token]) -> Any:
        made = CompletionAnswer(g, name, before, echo)
        return made.joined([part for token in tokens for part in made.parts(token)])

    return replace(text, index=index), answer


def _bounded(
    model: LoadedModel,
    ids: Sequence[int],
    options: dict[str, Any],
    n_probs: int | None,
    kind: type[Generation] = Generation,
) -> TextRequest:
    """The text that options in OpenAI's words ask for, no longer than the model was trained for."""
    text, own = asked_for(model, ids, options.pop("max_tokens", None), n_probs, options, kind)
    if set(own) - {"n_ctx"}:
        raise BatchError(f"{min(own)} is no option of a line")
    room = model.hparams.n_ctx_scaled - len(text.prompt)
    if room <= 0:
        raise BatchError(
            f"the prompt has {len(text.prompt)} tokens; the model was trained for {len(text.prompt) + room}"
        )
    n = text.params.n_predict
    return replace(text, params=replace(text.params, n_predict=n if 0 <= n <= room else room))
