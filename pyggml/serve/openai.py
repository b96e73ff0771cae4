"""OpenAI's endpoints for texts: /v1/completions, /v1/chat/completions and /v1/models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from pyggml import limits
from pyggml.errors import SamplerError, whole
from pyggml.llm.generate.generation import Generation
from pyggml.llm.openai.budget import ReasoningBudget
from pyggml.llm.openai.chat import Chat, ChatAnswer, read_chat
from pyggml.llm.openai.request import new_id
from pyggml.llm.openai.text import CompletionAnswer, kind_of
from pyggml.llm.samplers import LogitsProcessor, TextParams

from .engine_thread import Answering, is_progress
from .errors import HTTPError, no_model
from .http import DONE, Json, event
from .long_json import long_json
from .media import with_media
from .schemas import ChatBody, CompletionBody, ControlBody, TextBody
from .service import FINGERPRINT, Service, check_number, progress, service_of, timings


async def models(request: Request) -> Response:
    """GET /v1/models."""
    service = service_of(request)
    one = about(service)
    can = ["completion"] * bool(service.n_slot) + ["multimodal"] * any(service.modalities.values())
    details = {"format": "gguf", "family": service.model.arch, "families": [service.model.arch]}
    details |= {"parent_model": "", "parameter_size": "", "quantization_level": service.file_type}
    names = {"name": one["id"], "model": one["id"], "type": "model", "capabilities": can, "details": details}
    names |= {**dict.fromkeys(("description", "digest", "modified_at", "parameters", "size"), ""), "tags": [""]}
    return Json({"object": "list", "data": [one], "models": [names]})


async def model(request: Request) -> Response:
    """GET /v1/models/{id}."""
    service, id = service_of(request), request.path_params["id"]
    if id not in (service.name, *service.options.aliases):
        raise no_model(id)
    return Json(about(service))


# llama.cpp's numbers of kinds of vocabularies; all others are byte pairs (2).
_VOCABULARIES = {"none": 0, "llama": 1, "bert": 3, "t5": 4, "rwkv": 5, "plamo2": 6}


def about(service: Service) -> dict[str, Any]:
    """What /v1/models says of a model."""
    model, hp = service.model, service.model.hparams
    meta = {
        "vocab_type": _VOCABULARIES.get(str(model.kv.get("tokenizer.ggml.model")), 2),
        "n_vocab": hp.n_vocab,
        "n_ctx": service.n_slot,
        "n_ctx_train": hp.n_ctx_train,
        "n_embd": hp.n_embd,
        "n_params": sum(t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3] for t in model.tensors.values()),
        "size": sum(t.nbytes for t in model.tensors.values()),
        "ftype": service.file_type,
    }
    made = {"object": "model", "created": service.created, "owned_by": "pyggml"}
    return {"id": service.name, "aliases": service.options.aliases, "tags": list[str](), **made, "meta": meta}


# -- completions ------------------------------------------------------------------------------------------------------


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    service = service_of(request)
    body = await service.read(request, CompletionBody.model_validate)
    id, echo = new_id("cmpl"), bool(body.echo)
    generations, texts = await service.prepared(lambda: _completions(service, body))
    answering = service.submit(body, generations)
    answers = [
        CompletionAnswer(g, service.name, text, echo, body.suffix, i, id)
        for i, (g, text) in enumerate(zip(generations, texts, strict=True))
    ]
    if body.stream:
        return service.stream(
            answering, _completion_events(service, body, answering, answers), ping=body.sse_ping_interval
        )
    return await long_json(await service.answered(request, answering, _whole_completion(service, answering, answers)))


def _completions(service: Service, body: CompletionBody) -> tuple[list[Generation], list[str]]:
    """The generations that a request asks for, and the prompt of each as text."""
    model = service.model
    if body.logprobs is not None:
        whole("logprobs", body.logprobs, 0, error=SamplerError)
    if body.suffix:
        prompts = _between(service, body.prompt, body.suffix)
    else:
        prompts = service.prompts("" if body.prompt is None else body.prompt)
    kind = kind_of(model, bool(body.echo), body.logprobs)
    generations = service.generations(body, prompts, service.params(body), body.logprobs, kind)
    n = len(generations) // len(prompts)
    return generations, [text for text in _texts(body.prompt, generations[::n]) for _ in range(n)]


def _between(service: Service, given: Any, suffix: str) -> list[list[int]]:
    """The tokens of prompts for what stands between them and the suffix, which is read with each of them."""
    texts = cast("list[Any]", given if isinstance(given, list) else ["" if given is None else given])
    check_number(len(texts))
    if not all(isinstance(text, str) for text in texts):
        raise HTTPError(400, "suffix: the prompt must be text, or a list of texts")
    if len(suffix) * len(texts) > limits.REQUEST_BYTES:
        raise HTTPError(413, f"the suffix, with each of {len(texts)} prompts, is longer than {limits.REQUEST_BYTES}")
    return [service.model.vocab.infill_ids(text, suffix) for text in texts]


def _texts(given: Any, generations: Sequence[Generation]) -> list[str]:
    """The prompt of each generation as text: as it was given, or what its tokens spell."""
    several = cast("list[Any]", given if isinstance(given, list) else [given])
    if all(isinstance(text, str) for text in several):
        return several
    return [g.ctx.model.detokenize(g.source or g.prompt, True) for g in generations]


async def _whole_completion(service: Service, answering: Answering, answers: Sequence[CompletionAnswer]) -> Any:
    parts: list[list[Any]] = [[] for _ in answers]
    async for i, token in answering:
        parts[i] += answers[i].parts(token)
    made = [a.joined(p) for a, p in zip(answers, parts, strict=True)]
    return _joined(service, answering, cast("Sequence[Mapping[str, Any]]", made))


async def _completion_events(
    service: Service, body: CompletionBody, answering: Answering, answers: Sequence[CompletionAnswer]
) -> AsyncIterator[bytes]:
    last: Any = None
    async for i, token in answering:
        if is_progress(token):
            continue
        for part in answers[i].parts(token):
            last = part
            yield event({**part, "system_fingerprint": FINGERPRINT, **_times(body, part, answering.generations[i])})
    async for end in _ends(service, body, answering, last):
        yield end


# -- chats ------------------------------------------------------------------------------------------------------------


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    service = service_of(request)
    body = await service.read(request, ChatBody.model_validate)
    answering, answers = await begin_chat(service, body)
    if body.stream:
        return service.stream(answering, _chat_events(service, body, answering, answers), ping=body.sse_ping_interval)
    return await long_json(await service.answered(request, answering, whole_chat(service, answering, answers)))


async def control(request: Request) -> Response:
    """POST /v1/chat/completions/control: end the reasoning of a chat that is being answered."""
    service = service_of(request)
    body = await service.read(request, ControlBody.model_validate)
    if not body.id:
        raise HTTPError(400, "missing completion id")
    if body.action != "reasoning_end":
        raise HTTPError(400, "unknown control action")
    stop = service.reasoning.get(body.id)
    if stop is None:
        said = "no answer of this id is under way with reasoning_control, and with reasoning that a text ends"
        return Json({"success": False, "message": said})
    stop.set()
    return Json({"success": True})


async def apply_template(request: Request) -> Response:
    """POST /apply-template."""
    service = service_of(request)
    body = await service.read(request, ChatBody.model_validate)
    return Json({"prompt": (await service.prepared(lambda: chat_of(service, body))).text})


async def input_tokens(request: Request) -> Response:
    """POST /v1/chat/completions/input_tokens: how many tokens a chat has."""
    service = service_of(request)
    return Json(await counted(service, await service.read(request, ChatBody.model_validate)))


async def counted(service: Service, body: ChatBody) -> dict[str, Any]:
    """The number of tokens of a chat, in the shape of OpenAI's count."""
    n = len(await service.prepared(lambda: chat_of(service, body).ids))
    return {"object": "response.input_tokens", "input_tokens": n}


def chat_of(service: Service, body: ChatBody) -> Chat:
    """The chat that a request asks for."""
    if body.messages is None:
        raise HTTPError(400, '"messages" is required')
    variables = {**service.variables, **(body.chat_template_kwargs or {})}
    if body.reasoning_effort == "none" or _budget(service, body) == 0:
        variables.setdefault("enable_thinking", False)
    elif body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    return read_chat(
        service.model,
        with_media(service, body.messages),
        body.tools,
        body.tool_choice,
        body.response_format,
        functions=body.functions,
        function_call=body.function_call,
        chat_template=service.template,
        chat_template_kwargs=variables,
        reasoning_format=body.reasoning_format or service.options.reasoning_format,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        part=_continued(service, body),
        add_generation_prompt=body.add_generation_prompt is not False,
    )


def _continued(service: Service, body: ChatBody) -> str | None:
    """The part of the last message that the answer continues: what the request asks for, and otherwise a message of the
    assistant at the end."""
    asked = body.continue_final_message
    messages = cast("list[Any]", body.messages) if isinstance(body.messages, list) else []
    last: Any = messages[-1] if messages else None
    if asked is False or not isinstance(last, dict):
        return None
    message = cast("dict[str, Any]", last)
    if asked is None:
        begun = message.get("role") == "assistant" and not message.get("tool_calls")
        if not begun or not service.options.prefill_assistant:
            return None
    elif body.add_generation_prompt:
        raise HTTPError(400, "continue_final_message and add_generation_prompt cannot both be true")
    if isinstance(asked, str):
        return asked
    return "reasoning_content" if message.get("reasoning_content") and not message.get("content") else "content"


def _budget(service: Service, body: ChatBody) -> int:
    """Tokens that the answer may reason for; -1: any number."""
    asked = body.reasoning_budget_tokens if body.thinking_budget_tokens is None else body.thinking_budget_tokens
    return service.options.reasoning_budget if asked is None else whole("thinking_budget_tokens", asked, -1)


def _processors(
    service: Service, body: ChatBody, chat: Chat, params: TextParams, stop: Event
) -> Callable[[], Sequence[LogitsProcessor]]:
    """Makes what holds an answer to its budget of reasoning, and ends it at `stop`. A grammar says itself what may be
    written."""
    n, (begin, mark) = _budget(service, body), chat.form.reasoning
    if n < 0 and not body.reasoning_control:
        return tuple
    if not chat.form.ends_reasoning or params.grammar is not None or params.json_schema is not None:
        return tuple
    said, vocab = body.reasoning_budget_message, chat.model.vocab
    text = (service.options.reasoning_budget_message if said is None else said) + mark
    end = vocab.tokenize(text, False, True, continued=True)  # once: there may be thousands of answers
    begin = "" if chat.thinking else begin
    return lambda: (ReasoningBudget(vocab, len(chat.ids), n, begin, mark, end, stop),)


@dataclass(frozen=True)
class _Begun:
    chat: Chat
    generations: list[Generation]


async def begin_chat(service: Service, body: ChatBody) -> tuple[Answering, list[ChatAnswer]]:
    """Begin the answers to a chat."""
    id, stop = new_id("chatcmpl"), Event()

    def make() -> _Begun:
        chat = chat_of(service, body)
        params = service.params(body)
        if chat.constraint:
            params = replace(params, **{"grammar": None, "json_schema": None, **chat.constraint})
        params = replace(params, stop=(*chat.stop, *params.stops))
        if body.top_logprobs is not None and not body.logprobs:
            raise HTTPError(400, "top_logprobs requires logprobs to be set to true")
        n_probs = (body.top_logprobs or 0) if body.logprobs else None
        processors = _processors(service, body, chat, params, stop)
        return _Begun(
            chat, service.generations(body, [chat.ids], params, n_probs, processors=processors, media=[chat.media])
        )

    begun = await service.prepared(make)
    answers = [ChatAnswer(begun.chat, g, service.name, i, id) for i, g in enumerate(begun.generations)]
    answering = service.submit(body, begun.generations)
    if body.reasoning_control:
        service.reasoning[id] = stop
        answering.at_end = lambda: service.reasoning.pop(id, None)
    return answering, answers


async def whole_chat(service: Service, answering: Answering, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
    """The answers when they have ended, as one object."""
    async for i, token in answering:
        answers[i].take(token)
    return _joined(service, answering, cast("Sequence[Mapping[str, Any]]", [a.whole() for a in answers]))


async def _chat_events(
    service: Service, body: ChatBody, answering: Answering, answers: Sequence[ChatAnswer]
) -> AsyncIterator[bytes]:
    last: Any = None
    for answer in answers:
        last = answer.role()
        last["choices"][0]["delta"]["content"] = ""  # as OpenAI's: there are clients that look for it
        yield event({**last, "system_fingerprint": FINGERPRINT})
    async for i, token in answering:
        if is_progress(token):
            shown = {**answers[i].role(), "prompt_progress": progress(answering.generations[i])}
            yield event({**shown, "system_fingerprint": FINGERPRINT})
        for part in answers[i].parts(token):
            yield event({**part, "system_fingerprint": FINGERPRINT, **_times(body, part, answering.generations[i])})
    async for end in _ends(service, body, answering, last):
        yield end


# -- both -------------------------------------------------------------------------------------------------------------


def _times(body: TextBody, part: Any, g: Generation) -> dict[str, Any]:
    """The times of a text so far: in each part for those who want that, and otherwise in the last part."""
    last = part["choices"][0]["finish_reason"] is not None
    return {"timings": timings(g)} if body.timings_per_token or last else {}


async def _ends(
    service: Service, body: CompletionBody | ChatBody, answering: Answering, last: Any
) -> AsyncIterator[bytes]:
    if last is not None and body.stream_options is not None and body.stream_options.include_usage:
        counted = {"usage": service.usage(answering.generations), "timings": timings(answering.generations[0])}
        yield event({**last, "choices": [], "system_fingerprint": FINGERPRINT, **counted})
    yield DONE


def _joined(service: Service, answering: Answering, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several answers as one, with a choice for each."""
    return {
        **answers[0],
        "choices": [choice for answer in answers for choice in answer["choices"]],
        "usage": service.usage(answering.generations),
        "system_fingerprint": FINGERPRINT,
        "timings": timings(answering.generations[0]),
    }
