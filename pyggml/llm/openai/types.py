"""The shapes of answers: OpenAI's, as llama-cpp-python gives them."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

FinishReason = Literal["stop", "length", "tool_calls"]


class Usage(TypedDict):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(TypedDict):
    """For each token: the offset of its text, its log-probability, its text, and the likeliest tokens with their
    log-probabilities."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(TypedDict):
    """A text."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(TypedDict, total=False):
    """An answer, or a part of one that is streamed (without `usage`)."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ToolCallFunction(TypedDict, total=False):
    """The arguments are JSON text. A part of a call without a name goes on with the arguments."""

    name: str
    arguments: str


class ToolCall(TypedDict, total=False):
    """`index`: in parts of an answer."""

    index: int
    id: str
    type: Literal["function"]
    function: ToolCallFunction


class ChatMessage(TypedDict, total=False):
    """The reply. `function_call`: the first call, for those who asked with `functions`."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str
    tool_calls: list[ToolCall]
    function_call: ToolCallFunction


class TopLogprob(TypedDict):
    """A token that could have been."""

    id: int
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Of each token."""

    content: list[ChatLogprob]
    refusal: None


class ChatChoice(TypedDict):
    """A reply."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(TypedDict):
    """An answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(TypedDict):
    """What is new: in the first part the role, in the last nothing but the reason of the end."""

    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class _ChunkUsage(TypedDict, total=False):
    usage: Usage


class ChatCompletionChunk(_ChunkUsage):
    """A part of an answer to a chat. `usage`: in the last one, when that was asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]


class EmbeddingData(TypedDict):
    """The embedding of a text, or of each of its tokens when the model does not pool them."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | list[list[float]]


class EmbeddingAnswer(TypedDict):
    """The embeddings of texts."""

    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: dict[str, int]


Tool = dict[str, Any]
