"""`gg.batch`: many requests, answered by a model or by the model at a path."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from pyggml.errors import ModelError
from pyggml.signature import hands_on

from .embed import embed
from .generate.batched import new_contexts
from .generate.requests import Result, answer
from .loaded import LoadedModel
from .model import load_model
from .openai.batch_lines import read_line
from .samplers import N_PREDICT, TEXT_KEYWORDS, TextOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import ContextOptions


@hands_on(*TEXT_KEYWORDS)
def batch(
    model: LoadedModel | str | os.PathLike[str] | None,
    requests: Iterable[Any],
    n_predict: int = N_PREDICT,
    *,
    n_parallel: int = 32,
    n_threads: int | None = None,
    flash_attn: bool = True,
    context: ContextOptions | None = None,
    kv_ram: int | str | None = None,
    ram: int | str | None = None,
    **asked: Unpack[TextOptions],
) -> Iterator[Result]:
    """Continue many prompts, `n_parallel` at a time: when one ends, the next begins. Yields one dict for each request,
    in the order of the requests, as soon as all requests before it are done.

    A request is a text or a mapping. A mapping has `prompt` (text or token ids) or `messages` (a chat, for the model's
    template), and may have `id`, `n_predict`, `stop` and the fields of `SamplingParams`, which then count instead of
    those given here. Or it has `input`, text or token ids, and the result has its `embedding`, a list of numbers (see
    `Model.embed`). When the model's weights are streamed, each read of a layer serves all requests that are under way.
    The context has room for the `n_parallel` longest of them (`context`: further arguments for it). Prompt and text
    together are no longer than the model was trained for. A result does not depend on which other requests run at the
    same time (docs/company.md). A cache larger than `kv_ram` lies in a file, see `LlamaContext`.

    `model` may be a path, or None for the model that ships with the package. Such a model is loaded with at most `ram`
    ("2GiB", or bytes) of its weights in memory, see `load_model`.

    A mapping with `messages` may have `tools`, and its result has `tool_calls`. Lines of OpenAI's batch files
    (`custom_id`, `method`, `url`, `body`) are taken, too: their bodies have all options, and none of those given here
    count; their results have `custom_id` and `response`, with a completion or a chat completion as its `body`.

    A result has `index`, the request's `id` if it has one, and `text`, `finish_reason`, `n_prompt`, `n_predicted`. When
    a request fails, its result has `error` instead, with what is wrong, and the others go on; the same holds for a
    request that is a GGMLError itself. Raises BatchError for a bad `n_parallel`, SamplerError for bad sampling
    parameters, ModelError for `ram` with a model that is loaded already, and what `load_model` raises.
    """
    if not isinstance(model, LoadedModel):
        model = load_model(model, ram=ram)
    elif ram is not None:
        raise ModelError("the model is loaded: give `ram` to load_model, or the path of the model to batch")
    own: ContextOptions = {"n_threads": n_threads, "flash_attn": flash_attn, "kv_ram": kv_ram}
    vectors = partial(embed, model, n_threads=n_threads, flash_attn=flash_attn)
    contexts = new_contexts(model, own, context)
    return answer(model, requests, contexts, n_predict, vectors, read_line, n_parallel=n_parallel, **asked)
