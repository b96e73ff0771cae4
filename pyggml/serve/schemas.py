"""The bodies of requests. What concerns the choice of tokens follows from `TextParams`, by all of its names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, create_model, field_validator
from pydantic_core import CoreSchema

from pyggml import limits
from pyggml.errors import SamplerError
from pyggml.llm.samplers import TextOptions, TextParams, our_names, with_options
from pyggml.llm.samplers.params import OPTIONS
from pyggml.llm.vocab import Vocab

from .errors import HTTPError

_RANDOM = 0xFFFFFFFF  # llama.cpp's seed that stands for another seed each time
_OTHER_TYPES: dict[str, Any] = {  # options that JSON has in more forms than Python
    "logit_bias": Mapping[str, Any] | Sequence[Sequence[Any]],
    "json_schema": Mapping[str, Any] | bool | str,
}


def _fail_fast(schema: Any) -> None:
    """Let all lists in a schema of pydantic fail by one item."""
    if isinstance(schema, dict):
        found = cast("dict[str, Any]", schema)
        if found.get("type") == "list":
            found["fail_fast"] = True
        for part in found.values():
            _fail_fast(part)
    elif isinstance(schema, list):
        for part in cast("list[Any]", schema):
            _fail_fast(part)


class Body(BaseModel):
    """A JSON object. Members that are not known are ignored, as other servers do; null stands for a default."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Lists are read up to their first wrong item: of 16 MB, the errors of all took a minute, and 9 GB."""
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @field_validator("*", mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        """JSON has one kind of number: 5.0 is the integer 5."""
        return int(value) if type(value) is float and value.is_integer() else value

    @property
    def given(self) -> dict[str, Any]:
        """The members that are given, without those that are null."""
        return {k: v for k in self.model_fields_set if (v := getattr(self, k)) is not None}


if TYPE_CHECKING:
    Sampled = Body
else:
    _hints = get_type_hints(TextOptions) | {"n_predict": int} | _OTHER_TYPES
    Sampled = create_model("Sampled", __base__=Body, **{name: (kind | None, None) for name, kind in _hints.items()})


def sampling(body: Body, defaults: TextParams, vocab: Vocab) -> TextParams:
    """How a request wants its text. Raises SamplerError for values out of range."""
    ours = {k: v for k, v in our_names(_first_names(body.given)).items() if k in OPTIONS}
    if "logit_bias" in ours:
        ours["logit_bias"] = _biases(ours["logit_bias"], vocab)
    if ours.get("seed") == _RANDOM:
        ours["seed"] = None
    for one, other in (("grammar", "json_schema"), ("json_schema", "grammar")):  # an empty one is none
        if ours.get(one) == "":
            ours[one] = None
        elif ours.get(one) is not None:
            ours.setdefault(other, None)
    if isinstance(ours.get("json_schema"), bool):
        ours["json_schema"] = {} if ours["json_schema"] else {"not": {}}
    return with_options(defaults, ours)


def _first_names(given: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's newer name of max_tokens, which counts more."""
    if "max_completion_tokens" in given:
        given["max_tokens"] = given["max_completion_tokens"]
    if "max_tokens" in given:
        given.pop("n_predict", None)
    return given


def _biases(given: Any, vocab: Vocab) -> dict[int, Any]:
    """{token: bias}, from an object or a list of pairs; a text that is no number stands for all its tokens."""
    pairs: list[Any] = list(cast("Mapping[str, Any]", given).items()) if isinstance(given, Mapping) else list(given)
    found: dict[int, Any] = {}
    n_texts = 0
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[0], (int, str)):
            raise SamplerError(f"logit_bias: a token and its bias are [token, bias], not {pair!r:.60}")
        token, bias = pair
        if isinstance(token, str) and not token.isdecimal():
            n_texts += 1
            if n_texts > limits.BIASED_TEXTS:
                raise SamplerError(f"logit_bias: more than limits.BIASED_TEXTS = {limits.BIASED_TEXTS} texts")
            found.update(dict.fromkeys(vocab.tokenize(token, False), bias))
        elif isinstance(token, str) and len(token) > 10:
            raise SamplerError(f"logit_bias: there is no token {token:.60}")
        else:
            found[int(token)] = bias
    return found


# Members that llama-server has and this server refuses, unless they have these values, which change nothing.
REFUSED: Mapping[str, Any] = {
    "grammar_lazy": False,
    "parse_tool_calls": True,
}
# Members that llama-server has and that change no answer: hints to its cache and its GPU, what its own /apply-template
# says to its own /completion, and what it does not read itself. (They are ignored as unknown members are.)
HINTS = {
    "backend_sampling",
    "chat_format",
    "chat_parser",
    "generation_prompt",
    "grammar_triggers",
    "message_delimiters",
    "metadata",
    "n_cache_reuse",
    "preserved_tokens",
    "reasoning_budget_end_tag",
    "reasoning_budget_end_tags",
    "reasoning_budget_start_tag",
    "t_max_prompt_ms",
    "verbose",
}


def refuse(body: Body) -> None:
    """Raises HTTPError (501) for a member that is refused, see `REFUSED`."""
    for name, harmless in REFUSED.items():
        if body.given.get(name, harmless) != harmless:
            raise HTTPError(501, f"{name} is an option of llama-server that this server does not have")


class TextBody(Sampled):
    """What all requests for texts have."""

    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    cache_prompt: bool | None = None
    timings_per_token: bool | None = None
    t_max_predict_ms: int | None = None
    id_slot: int | None = None
    n_keep: int | None = None
    n_discard: int | None = None
    lora: list[Any] | None = None
    min_keep: int | None = None
    n_indent: int | None = None
    return_progress: bool | None = None
    grammar_lazy: bool | None = None
    parse_tool_calls: bool | None = None
    sse_ping_interval: int | None = None
    max_completion_tokens: int | None = None


class NativeBody(TextBody):
    """/completion, /infill."""

    prompt: Any = None
    n_probs: int | None = None
    post_sampling_probs: bool | None = None
    n_cmpl: int | None = None
    return_tokens: bool | None = None
    response_fields: list[str] | None = None
    input_prefix: str | None = None
    input_suffix: str | None = None
    input_extra: list[dict[str, Any]] | None = None


class StreamOptions(Body):
    """Of a stream."""

    include_usage: bool | None = None


class CompletionBody(TextBody):
    """/v1/completions."""

    prompt: Any = None
    suffix: str | None = None
    logprobs: int | None = None
    echo: bool | None = None
    stream_options: StreamOptions | None = None


class ChatBody(TextBody):
    """/v1/chat/completions, /apply-template."""

    messages: Any = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | str | None = None
    add_generation_prompt: bool | None = None
    reasoning_effort: str | None = None
    reasoning_format: str | None = None
    thinking_budget_tokens: int | None = None
    reasoning_budget_tokens: int | None = None
    reasoning_budget_message: str | None = None
    reasoning_control: bool | None = None


class ControlBody(Body):
    """/v1/chat/completions/control."""

    model: str | None = None
    id: str | None = None
    action: str | None = None


class TokenizeBody(Body):
    """/tokenize."""

    content: Any = ""
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    """/detokenize."""

    tokens: list[int]


class EmbeddingBody(Body):
    """/v1/embeddings, /embedding."""

    model: str | None = None
    input: Any = None
    content: Any = None
    encoding_format: str | None = None
    dimensions: int | None = None
    embd_normalize: float | None = None


class RerankBody(Body):
    """/rerank."""

    model: str | None = None
    query: str | None = None
    documents: list[str | dict[str, Any]] | None = None
    texts: list[str] | None = None
    top_n: int | None = None
    return_text: bool | None = None
    return_documents: bool | None = None


class EditBody(Body):
    """What changes a node: the rows of `tokens` (all) times `scale`, plus `add`, a number or a row."""

    node: str
    tokens: list[int] | None = None
    scale: float | None = None
    add: float | list[float] | None = None


class ActivationsBody(Body):
    """/v1/activations."""

    model: str | None = None
    prompt: Any = None
    nodes: list[str] | None = None
    edits: list[EditBody] | None = None
    format: str | None = None
    lora: list[Any] | None = None


class InsideBody(ChatBody):
    """/v1/inside: a prompt, or a chat."""

    prompt: Any = None
    n_top: int | None = None


class Adapter(Body):
    """An adapter and its scale."""

    id: int
    scale: float
