"""`Model.create_chat_completion`: the reply to a chat, with tools, as JSON, in parts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from pyggml import limits
from pyggml.errors import ModelError, SamplerError, one_of, whole

from ..generate.generation import Generation, Token
from ..generate.kept import KeptContext, begin, begin_several, several
from ..generate.templates import ChatTemplate, find_template
from ..generate.text import TextStream, chat_ids, stop_strings
from ..loaded import LoadedModel
from ..vocab import Vocab
from .continued import PARTS, check_continued, continued, is_reasoning
from .formats import REASONING_FORMATS, Dialect, Format, find_format, forced_calls
from .messages import has_media, prompt_of
from .reply import Call, Reply
from .request import SamplingRequest, asked_for, finish, new_id, now, piece, tools_of, usage, usage_of, usage_wanted
from .types import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    FinishReason,
    ToolCall,
    ToolCallFunction,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..media_prompt import PlacedMedia

Schema = Mapping[str, Any]
_NINE = {"mistral", "mistral-args"}  # whose templates want ids of nine letters


def create_chat_completion(
    model: LoadedModel,
    /,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    logprobs: bool | None = False,
    top_logprobs: int | None = None,
    stream: bool = False,
    *,
    functions: Sequence[Mapping[str, Any]] | None = None,
    function_call: str | Mapping[str, Any] | None = None,
    chat_template: str | ChatTemplate | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    n: int | None = None,
    stream_options: Mapping[str, Any] | None = None,
    name: str | None = None,
    kept: KeptContext | None = None,
    **request: Unpack[SamplingRequest],
) -> ChatCompletion | Iterator[ChatCompletionChunk]:
    """The reply to a chat, in the shape of OpenAI's chat completions; with `stream` an iterator of parts.

    Calls of `tools` are read out of the reply in the form of the model's family (`tool_calls`, as JSON text), and
    so is its reasoning (`reasoning_content`). `tool_choice`: "none", "auto", "required", or a function to call; a
    grammar forces the call. `functions` and `function_call` are older names of the two. `response_format`:
    json_object or json_schema. `logprobs` with `top_logprobs` alternatives. The chat template is the model's own,
    or that of `chat_template`; `chat_template_kwargs` are variables for it (`enable_thinking`). `n`: replies, with
    seeds that follow each other. `stream_options` {"include_usage": True}: a last part, without choices, has the
    number of tokens. `name`: the name of the model in the answer. `kept`: a context that stays for the next request,
    whose chat may begin alike. The temperature is 0.2 unless another is given. Raises ModelError for bad messages and
    tools, and what `Model.stream` raises.
    """
    chat = read_chat(
        model,
        messages,
        tools,
        tool_choice,
        response_format,
        functions=functions,
        function_call=function_call,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
    )
    options: dict[str, Any] = {"temperature": 0.2, **request, **chat.constraint}
    n_probs = (top_logprobs or 0) if logprobs else None
    stop = options.get("stop")
    options["stop"] = (*chat.stop, *stop_strings(() if stop is None else stop, SamplerError))
    asked, own = asked_for(model, chat.ids, max_tokens, n_probs, options)
    n = whole("n", 1 if n is None else n, 1, limits.REQUEST_TEXTS, SamplerError)
    texts = several(replace(asked, media=chat.media), n)
    with_usage = usage_wanted(stream_options)
    if n == 1:
        g, tokens = begin(model, texts[0], own, kept)
        generations, numbered = [g], ((0, token) for token in tokens)
    else:
        generations, numbered = begin_several(model, texts, own)
    id = new_id("chatcmpl")
    answers = [ChatAnswer(chat, g, name or model.path, i, id) for i, g in enumerate(generations)]
    if stream:
        return _streamed(answers, numbered, with_usage)
    for i, token in numbered:
        answers[i].take(token)
    wholes = [answer.whole() for answer in answers]
    choices = [choice for answer in wholes for choice in answer["choices"]]
    return {**wholes[0], "choices": choices, "usage": usage_of(generations, n)}


def _streamed(
    answers: Sequence[ChatAnswer], tokens: Iterator[tuple[int, Token]], with_usage: bool
) -> Iterator[ChatCompletionChunk]:
    last: ChatCompletionChunk | None = None
    for answer in answers:
        yield answer.role()
    for i, token in tokens:
        for last in answers[i].parts(token):
            yield last
    if with_usage and last is not None:
        yield {**last, "choices": [], "usage": usage_of([a.g for a in answers], len(answers))}


@dataclass(frozen=True)
class Chat:
    """A chat that is to be answered.

    text        the chat as its template writes it, up to the reply
    form        how the model's family writes calls and reasoning
    names       the tools that may be called
    thinking    whether the reply begins inside reasoning
    stop        strings that end a reply of this template
    constraint  options that force a call, or JSON
    with_function_call  whether the answer names its first call the old way, too
    reasoning   where reasoning goes, one of REASONING_FORMATS
    one_call    whether further calls are left out
    media       what the chat has of pictures and sounds
    placed      its tokens then, with placeholders
    part        the part of the last message that the reply continues, one of PARTS; None: it is a message of its own
    """

    model: LoadedModel
    text: str
    form: Format
    names: frozenset[str]
    thinking: bool
    stop: tuple[str, ...]
    constraint: Mapping[str, Any]
    with_function_call: bool
    reasoning: str = "auto"
    one_call: bool = False
    media: PlacedMedia | None = None
    placed: list[int] | None = None
    part: str | None = None

    @cached_property
    def ids(self) -> list[int]:
        """The tokens of the chat."""
        return chat_ids(self.model.vocab, self.text) if self.placed is None else self.placed


def read_chat(
    model: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    *,
    functions: Sequence[Mapping[str, Any]] | None = None,
    function_call: str | Mapping[str, Any] | None = None,
    chat_template: str | ChatTemplate | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    reasoning_format: str = "auto",
    parallel_tool_calls: bool = True,
    part: str | None = None,
    add_generation_prompt: bool = True,
) -> Chat:
    """Read what a chat asks for. `reasoning_format`: one of REASONING_FORMATS. `parallel_tool_calls`: whether there may
    be several calls. `part`: the reply continues this part of the last message, one of PARTS. `add_generation_prompt`:
    whether the text goes on to the place where a reply begins. Other arguments, and errors: see
    `create_chat_completion`."""
    one_of("reasoning_format", reasoning_format, REASONING_FORMATS, ModelError)
    tools, functions = _dicts("tools", tools), _dicts("functions", functions)
    if functions is not None and tools is None:
        tools = [{"type": "function", "function": f} for f in functions]
    choice = tool_choice if tool_choice is not None else _of_function_call(function_call)
    offered = [] if choice == "none" else list(tools or ())
    schemas = tools_of(offered)
    template = chat_template if isinstance(chat_template, ChatTemplate) else find_template(chat_template, model.kv)
    source = template.source if template.tool_use is None or not offered else template.tool_use
    form = template.form if isinstance(template, Dialect) else find_format(source)

    def written(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        return prompt_of(template, model.vocab, messages, offered, chat_template_kwargs or {}, add_generation_prompt)

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        if part is None:
            return written(messages, add_generation_prompt)
        check_continued(messages, part)
        return continued(written, messages, part, form)

    ids, media = None, None
    if has_media(messages):
        from ..generate.media_chat import place, split_messages

        text, ids, media = place(model, *split_messages(messages), render, template.name)
    else:
        text = render(messages)
    thinking = form.opens_reasoning(text) if part is None else is_reasoning(messages, part, form)
    constraint = _constraint(model.vocab, form, thinking, _forced(choice, schemas), _schema_of(response_format))
    if part is not None and constraint:
        raise ModelError(
            "continue_final_message: a reply that was begun can neither follow a schema nor be made a call"
        )
    thinking = thinking and not constraint.keys() & {"grammar"}  # such a grammar ends the reasoning first
    old = functions is not None
    return Chat(
        model,
        text,
        form,
        frozenset(schemas),
        thinking,
        template.stop,
        constraint,
        old,
        reasoning_format,
        not parallel_tool_calls,
        media,
        ids,
        part,
    )


def _dicts(name: str, given: Any) -> Sequence[Mapping[str, Any]] | None:
    if given is not None and (isinstance(given, (str, Mapping)) or not isinstance(given, Sequence)):
        raise ModelError(f"{name} must be a list of dicts, not {given!r:.60}")
    return cast("Sequence[Mapping[str, Any]] | None", given)


def _of_function_call(choice: str | Mapping[str, Any] | None) -> str | Mapping[str, Any] | None:
    return {"type": "function", "function": choice} if isinstance(choice, Mapping) else choice


def _forced(choice: str | Mapping[str, Any] | None, schemas: Mapping[str, Schema]) -> Mapping[str, Schema]:
    """The tools that the model must choose from; empty when it need not call any."""
    if choice in (None, "auto", "none"):
        return {}
    if choice in ("required", "any"):
        if not schemas:
            raise ModelError("tool_choice 'required' needs tools")
        return schemas
    if isinstance(choice, Mapping):
        function: Any = choice.get("function")
        name = cast("Mapping[str, Any]", function).get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str) and name in schemas:
            return {name: schemas[name]}
        raise ModelError(f"tool_choice: there is no tool {name!r:.60}; there are: {', '.join(schemas) or 'none'}")
    raise ModelError(f"tool_choice must be none, auto, required, or name a function, not {choice!r:.60}")


def _schema_of(response_format: Mapping[str, Any] | None) -> Schema | None:
    """The JSON schema that a reply must follow."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"response_format must be a dict with a type, not {response_format!r:.60}")
    match response_format.get("type"):
        case "text":
            return None
        case "json_object":
            return response_format.get("schema") or {"type": "object"}
        case "json_schema":
            told: Any = response_format.get("json_schema", response_format)
            schema = cast(Any, told.get("schema") if isinstance(told, Mapping) else None)
            if isinstance(schema, (Mapping, bool)):
                return cast("Schema", schema)
            raise ModelError("response_format: a json_schema with a schema is missing")
        case kind:
            raise ModelError(f"response_format: the type must be text, json_object or json_schema, not {kind!r:.60}")


class _Raw(TextStream):
    """The text of a reply with the special tokens that mean something in it."""

    def __init__(self, vocab: Vocab, stop: Sequence[str], form: Format) -> None:
        super().__init__(vocab, stop)
        ids = {m: vocab.tokenize(m, False, True, continued=True) for m in form.markers}
        self._markers = {i[0]: m for m, i in ids.items() if len(i) == 1}

    def push(self, token: int) -> str:
        marker = self._markers.get(token)
        return super().push(token) if marker is None else self._filter(self._decoder.flush() + marker)


def _constraint(
    vocab: Vocab, form: Format, thinking: bool, forced: Mapping[str, Schema], schema: Schema | None
) -> dict[str, Any]:
    """The options that make the reply a call, or follow a schema. Reasoning that has begun is ended first."""
    if not forced and schema is None:
        return {}
    if not forced and not thinking:
        return {"json_schema": schema}
    from ..samplers.grammar import known_schema, lark_of_schema  # takes longer to import than all else

    grammar = forced_calls(form, forced, vocab, known_schema) if forced else lark_of_schema(cast(Schema, schema))
    if thinking:
        end = json.dumps(form.reasoning[1] + "\n\n")
        grammar = grammar.replace("start: ", f"start: {end} begun\nbegun: ", 1)
    return {"grammar": grammar}


class ChatAnswer:
    """Makes an answer of the tokens of a reply: whole (`take` each token, then `whole`) or in parts (`role`, then
    `parts` of each token). `index`: which of several answers to the same chat it is."""

    def __init__(self, chat: Chat, g: Generation, name: str, index: int = 0, id: str | None = None) -> None:
        self.g, self._chat, self._name, self._index = g, chat, name, index
        self._ids: list[str] = []  # the ids of calls
        self._id, self._created = id or new_id("chatcmpl"), now()
        self._raw = _Raw(chat.model.vocab, g.stop, chat.form)
        self._text = "" if chat.part is None else chat.form.opened[PARTS.index(chat.part)]
        self._entries = list[ChatLogprob]()
        self._before = Reply()
        self._sent = ""  # of the arguments of the call that is being written

    def take(self, token: Token) -> None:
        """Read the next token."""
        raw = self._raw
        if token.finish_reason != "eog" and token.id >= 0:
            self._text += raw.push(token.id)
            if self.g.n_probs is not None:
                self._entries.append(_entry(self._chat.model, token))
        if token.finish_reason is not None and not raw.stopped:
            self._text += raw.flush()

    def whole(self) -> ChatCompletion:
        """The answer when the reply has ended."""
        reply = self._reply(True)
        message: ChatMessage = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
        self._add(message, reply, 0)
        reason = _reason(reply, finish(self.g.finish_reason))
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._name,
            "choices": [
                {"index": self._index, "message": message, "logprobs": self._logprobs(), "finish_reason": reason}
            ],
            "usage": usage(self.g),
        }

    def role(self) -> ChatCompletionChunk:
        """The first part."""
        return self._chunk({"role": "assistant"}, None, None)

    def parts(self, token: Token) -> list[ChatCompletionChunk]:
        """The parts after a token: text and calls as they come, and after the last token the reason why the reply
        ended."""
        self.take(token)
        chat = self._chat
        done, before = token.finish_reason is not None, self._before
        self._before = reply = self._reply(done)
        delta: ChatMessage = {}
        broken_off = done and self._sent and len(reply.calls) == len(before.calls)  # a call, which is no content now
        if len(reply.content) > len(before.content) and not broken_off:
            delta["content"] = reply.content[len(before.content) :]
        if len(reply.reasoning) > len(before.reasoning):
            delta["reasoning_content"] = reply.reasoning[len(before.reasoning) :]
        self._add(delta, Reply(calls=reply.calls), len(before.calls))
        if reply.begun is not None and not (chat.one_call and reply.calls):
            self._add_begun(delta, len(reply.calls), reply.begun)
        logprobs = self._logprobs()
        parts = [self._chunk(delta, logprobs, None)] if delta or logprobs is not None else []
        return [*parts, self._chunk({}, None, _reason(reply, finish(token.finish_reason)))] if done else parts

    def _reply(self, done: bool) -> Reply:
        chat = self._chat
        reply = chat.form.parse(self._text, done, chat.names, chat.thinking, chat.reasoning, chat.part is not None)
        if chat.one_call:
            del reply.calls[1:]
        return reply

    def _logprobs(self) -> ChatLogprobs | None:
        """The log-probabilities of the tokens since the last call."""
        entries, self._entries = self._entries, []
        return None if self.g.n_probs is None else {"content": entries, "refusal": None}

    def _add(self, message: ChatMessage, reply: Reply, first: int) -> None:
        """Put reasoning and calls, from the call `first` on, into a message."""
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        calls: list[ToolCall] = []
        for i, call in enumerate(reply.calls[first:], first):
            if i == len(self._ids):
                self._new_id(call)
            if self._sent:  # its beginning is with the client
                calls.append({"index": i, "function": {"arguments": call.arguments[len(self._sent) :]}})
                self._sent = ""
            else:
                calls.append(self._whole_call(i, call))
        self._add_calls(message, calls)

    def _whole_call(self, i: int, call: Call) -> ToolCall:
        function: ToolCallFunction = {"name": call.name, "arguments": call.arguments}
        return {"index": i, "id": self._ids[i], "type": "function", "function": function}

    def _add_calls(self, message: ChatMessage, calls: list[ToolCall]) -> None:
        if calls:
            message["tool_calls"] = [*message.get("tool_calls", ()), *calls]
            if self._chat.with_function_call and calls[0].get("index") == 0 and "function" in calls[0]:
                message["function_call"] = calls[0]["function"]

    def _add_begun(self, message: ChatMessage, i: int, call: Call) -> None:
        """Put what is new of the call that is being written into a message."""
        new = call.arguments[len(self._sent) :]
        if not new or (self._chat.names and call.name not in self._chat.names):
            return
        if self._sent:
            self._add_calls(message, [{"index": i, "function": {"arguments": new}}])
        else:
            self._new_id(call)
            self._add_calls(message, [self._whole_call(i, call)])
        self._sent = call.arguments

    def _new_id(self, call: Call) -> None:
        own = uuid4().hex
        self._ids.append(call.id or (own[:9] if self._chat.form.name in _NINE else f"call_{own[:24]}"))

    def _chunk(
        self, delta: ChatMessage, logprobs: ChatLogprobs | None, reason: FinishReason | None
    ) -> ChatCompletionChunk:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._name,
            "choices": [{"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}],
        }


def _reason(reply: Reply, reason: FinishReason | None) -> FinishReason | None:
    return "tool_calls" if reply.calls and reason != "length" else reason


def _entry(model: LoadedModel, token: Token) -> ChatLogprob:
    def top(i: int, x: float) -> Any:
        data = piece(model, i)
        return {"id": i, "token": data.decode("utf-8", "replace"), "logprob": x, "bytes": list(data)}

    own = top(token.id, token.logprob or 0.0)
    return cast(ChatLogprob, {**own, "top_logprobs": [top(i, x) for i, x in token.top]})
