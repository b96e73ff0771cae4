"""The shapes of requests and answers, by llama-cpp-python's names."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from ..llm.openai.types import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Completion,
    EmbeddingAnswer,
    EmbeddingData,
    ToolCall,
    ToolCallFunction,
    TopLogprob,
    Usage,
)

JsonType = None | int | str | bool | list[Any] | dict[str, Any]

# -- answers ----------------------------------------------------------------------------------------------------------

CreateCompletionResponse = CreateCompletionStreamResponse = CompletionChunk = Completion
CreateChatCompletionResponse = ChatCompletion
CreateChatCompletionStreamResponse = ChatCompletionStreamResponse = ChatCompletionChunk
CreateEmbeddingResponse, Embedding = EmbeddingAnswer, EmbeddingData
CompletionUsage = EmbeddingUsage = Usage
ChatCompletionResponseMessage = ChatCompletionMessage = ChatMessage
ChatCompletionStreamResponseDelta = ChatCompletionChunkDelta = ChatMessage
ChatCompletionResponseChoice = ChatCompletionChoice = ChatChoice
ChatCompletionStreamResponseChoice = ChatCompletionChunkChoice = ChatChunkChoice
ChatCompletionResponseFunctionCall = ChatCompletionFunctionCall = ToolCallFunction
ChatCompletionMessageToolCallFunction = ChatCompletionMessageToolCallChunkFunction = ToolCallFunction
ChatCompletionMessageToolCall = ChatCompletionMessageToolCallChunk = ToolCall
ChatCompletionMessageToolCalls = list[ToolCall]
ChatCompletionLogprobs, ChatCompletionLogprobToken = ChatLogprobs, ChatLogprob
ChatCompletionTopLogprobToken = TopLogprob

# -- requests ---------------------------------------------------------------------------------------------------------

ChatCompletionFunctionParameters = dict[str, JsonType]


class ChatCompletionFunction(TypedDict, total=False):
    """A function that may be called; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


ChatCompletionFunctions = ChatCompletionToolFunction = ChatCompletionFunction


class ChatCompletionTool(TypedDict):
    """A tool."""

    type: Literal["function"]
    function: ChatCompletionFunction


class ChatCompletionFunctionCallOption(TypedDict):
    """The name of the function to call."""

    name: str


ChatCompletionRequestFunctionCallOption = ChatCompletionNamedToolChoiceFunction = ChatCompletionFunctionCallOption
ChatCompletionRequestFunctionCall = Literal["none", "auto"] | ChatCompletionFunctionCallOption


class ChatCompletionNamedToolChoice(TypedDict):
    """The tool to call."""

    type: Literal["function"]
    function: ChatCompletionFunctionCallOption


ChatCompletionToolChoiceOption = Literal["none", "auto", "required"] | ChatCompletionNamedToolChoice


class ChatCompletionRequestResponseFormat(TypedDict, total=False):
    """The form of a reply."""

    type: Literal["text", "json_object"]
    schema: JsonType


class ChatCompletionRequestMessageContentPartText(TypedDict):
    """Text."""

    type: Literal["text"]
    text: str


class ChatCompletionRequestMessageContentPartImageImageUrl(TypedDict, total=False):
    """Where a picture is."""

    url: str
    detail: Literal["auto", "low", "high"]


class ChatCompletionRequestMessageContentPartImage(TypedDict):
    """A picture."""

    type: Literal["image_url"]
    image_url: str | ChatCompletionRequestMessageContentPartImageImageUrl


ChatCompletionRequestMessageContentPart = (
    ChatCompletionRequestMessageContentPartText | ChatCompletionRequestMessageContentPartImage
)


class ChatCompletionRequestSystemMessage(TypedDict):
    """What the model is told first."""

    role: Literal["system"]
    content: str | None


class ChatCompletionRequestUserMessage(TypedDict):
    """What the user says."""

    role: Literal["user"]
    content: str | list[ChatCompletionRequestMessageContentPart] | None


class ChatCompletionRequestAssistantMessage(TypedDict, total=False):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ToolCall]
    function_call: ToolCallFunction


class ChatCompletionRequestToolMessage(TypedDict):
    """What a tool gave."""

    role: Literal["tool"]
    content: str | None
    tool_call_id: str


class ChatCompletionRequestFunctionMessage(TypedDict):
    """What a function gave."""

    role: Literal["function"]
    content: str | None
    name: str


ChatCompletionRequestMessage = (
    ChatCompletionRequestSystemMessage
    | ChatCompletionRequestUserMessage
    | ChatCompletionRequestAssistantMessage
    | ChatCompletionRequestToolMessage
    | ChatCompletionRequestFunctionMessage
)
