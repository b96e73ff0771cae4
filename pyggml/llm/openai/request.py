"""A request in OpenAI's words, as the arguments of a generation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast
from uuid import uuid4

from pyggml.errors import BatchError, ModelError, SamplerError, whole

from ..generate.engine import FinishReason as Ended
from ..generate.generation import (
    Generation,
    OwnContext,
    StoppingCriteria,
    TextRequest,
    functions,
    ids_of,
    source_and_prompt,
)
from ..loaded import LoadedModel
from ..samplers import LogitsProcessor, text_params
from ..samplers.params import OTHER_NAMES
from .types import FinishReason, Usage


class SamplingRequest(TypedDict, total=False):
    """Options of completions and of chats by OpenAI's and llama-cpp-python's names. `None` means the default.
    `grammar`: GBNF, or an object with GBNF in `_grammar` (LlamaGrammar). The fields of `SamplingParams` may be given,
    too."""

    temperature: float | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    top_k: int | None
    stop: str | Sequence[str] | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repeat_penalty: float | None
    mirostat_mode: int | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    logit_bias: Mapping[Any, float] | None
    grammar: Any
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None
    stopping_criteria: StoppingCriteria | Sequence[StoppingCriteria] | None
    n_ctx: int | None
    n_threads: int | None
    flash_attn: bool
    max_completion_tokens: int | None  # max_tokens under its newer name
    tfs_z: float  # of old versions; it has no effect in llama-cpp-python either
    user: str | None


def asked_for(
    model: LoadedModel,
    prompt: str | Sequence[int],
    max_tokens: int | None,
    n_probs: int | None,
    request: Mapping[str, Any],
    kind: type[Generation] = Generation,
) -> tuple[TextRequest, OwnContext]:
    """The text that a request asks for, and the options of a context of its own. Raises SamplerError for an option that
    is not known."""
    options = dict(request)
    for ignored in ("tfs_z", "model", "user"):
        options.pop(ignored, None)
    options = {OTHER_NAMES.get(k, k): v for k, v in options.items() if v is not None}
    max_tokens = options.pop("max_completion_tokens", max_tokens)
    grammar = options.get("grammar")
    if grammar is not None and not isinstance(grammar, str):
        options["grammar"] = getattr(grammar, "_grammar", grammar)
    if isinstance(bias := options.get("logit_bias"), Mapping):
        try:
            options["logit_bias"] = {int(k): v for k, v in cast("Mapping[Any, float]", bias).items()}
        except (TypeError, ValueError):
            raise SamplerError(f"logit_bias must map tokens to numbers, not {bias!r:.60}") from None
    if "n_ctx" in options:
        whole("n_ctx", options["n_ctx"], 1, error=ModelError)
    n_predict = -1 if max_tokens is None else max(whole("max_tokens", max_tokens, error=BatchError), -1)
    n_predict = n_predict or -1  # 0 means no limit, as in llama-cpp-python: until the context is full
    if n_predict < 0 and "n_ctx" not in options:
        options["n_ctx"] = model.hparams.n_ctx_train
    own = cast(OwnContext, {k: options.pop(k) for k in OwnContext.__annotations__ if k in options})
    processors: Any = options.pop("logits_processor", ())
    stopping: Any = options.pop("stopping_criteria", ())
    special: Any = options.pop("special", False)
    try:
        params = text_params(n_predict, options)
    except TypeError as e:
        raise SamplerError(f"the request cannot be understood: {e}") from None
    source, ids = source_and_prompt(model, ids_of(model, prompt))
    text = TextRequest(
        ids,
        params,
        source,
        n_probs,
        functions("logits_processor", processors),
        functions("stopping_criteria", stopping),
        special,
        kind=kind,
    )
    n_ctx = own.get("n_ctx")
    if n_ctx is not None and n_predict >= 0 and text.n_prompt < n_ctx:
        own["n_ctx"] = min(n_ctx, text.n_prompt + n_predict)
    return text, own


def usage_wanted(stream_options: Mapping[str, Any] | None) -> bool:
    """Whether a stream ends with the number of its tokens. Raises SamplerError for anything but a dict."""
    if stream_options is not None and not isinstance(stream_options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SamplerError(f"stream_options must be a dict with include_usage, not {stream_options!r:.60}")
    return bool((stream_options or {}).get("include_usage"))


def usage_of(generations: Sequence[Generation], n_each: int = 1) -> Usage:
    """The tokens of several generations, `n_each` of each prompt, whose tokens count once."""
    n_prompt = sum(g.n_prompt for g in generations[::n_each])
    n = sum(len(g.ids) for g in generations)
    return {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}


def new_id(kind: str) -> str:
    """`cmpl-...`."""
    return f"{kind}-{uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def usage(g: Generation) -> Usage:
    """The tokens of a generation."""
    n_prompt, n = g.n_prompt, len(g.ids)
    return {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}


def finish(reason: Ended | None) -> FinishReason | None:
    """OpenAI's word for why a text ended."""
    return reason if reason is None or reason == "length" else "stop"


def piece(model: LoadedModel, token: int) -> bytes:
    """The text of a token, special ones too."""
    return model.vocab.token_to_piece(token, special=True)


def tools_of(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Mapping[str, Any]]:
    """Names of tools, and the schemas of their parameters. Raises ModelError for anything that is not a tool."""
    found: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools or ()):
        function: Any = tool.get("function") if isinstance(tool, Mapping) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if not isinstance(function, Mapping) or not isinstance(cast("Mapping[str, Any]", function).get("name"), str):
            raise ModelError(f"tools[{i}] must be a dict with type 'function' and a function with a name")
        known = cast("Mapping[str, Any]", function)
        found[known["name"]] = known.get("parameters") or {"type": "object", "properties": {}}
    return found
