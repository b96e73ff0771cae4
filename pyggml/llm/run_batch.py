"""`gg.batch`: many requests, answered by a model or by the model at a path."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from pyggml.errors import ModelError

from .embed import embed
from .generate.batched import new_contexts
from .generate.requests import Result, answer
from .loaded import LoadedModel
from .model import load_model
from .samplers import N_PREDICT, TextOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import ContextOptions


def batch(
    model: LoadedModel | str | os.PathLike[str] | None,
    requests: Iterable[Any],
    n_predict: int = N_PREDICT,
    *,
    n_parallel: int = 32,
    n_threads: int | None = None,
    flash_attn: bool = False,
    context: ContextOptions | None = None,
    kv_ram: int | str | None = None,
    ram: int | str | None = None,
    **asked: Unpack[TextOptions],
) -> Iterator[Result]:
    """Continue many prompts, `n_parallel` at a time: as one ends, the next joins. Yields one dict for each request, in
    their order, as soon as those before it are done.

    A request is a text, or a mapping with `prompt` (text or token ids) or `messages` (of a chat, for the model's
    template), and if it likes `id`, `n_predict`, `stop` and the fields of `SamplingParams`, before those given here; or
    with `input`, text or token ids, of which the result has the `embedding`, a list of numbers (see `Model.embed`). Of
    a model that is streamed each read of a layer serves all that are under way. The context has room for the longest
    `n_parallel` of them (`context`: further arguments of it); prompt and text together are no longer than the model was
    trained for. Which others are under way may decide between tokens that are as good as equally likely, and the last
    digits of embeddings (see `stream_batch`). A cache larger than `kv_ram` lies in a file, see `LlamaContext`.

    `model` may be the path of a model, or None for the one that ships with the package. It is loaded, then, with at
    most `ram` ("2GiB", or bytes) of its weights in memory, see `load_model`.

    A result has `index`, the request's `id` where it has one, and `text`, `finish_reason`, `n_prompt`, `n_predicted`;
    or `error`, what is wrong with that request (so has one that is a GGMLError itself), whatever it is: the others go
    on. Raises BatchError for a bad `n_parallel`, SamplerError for bad sampling parameters, ModelError for `ram` beside
    a model that is loaded, and what `load_model` raises.
    """
    if not isinstance(model, LoadedModel):
        model = load_model(model, ram=ram)
    elif ram is not None:
        raise ModelError("the model is loaded: give `ram` to load_model, or the path of the model to batch")
    own: ContextOptions = {"n_threads": n_threads, "flash_attn": flash_attn, "kv_ram": kv_ram}
    vectors = partial(embed, model, n_threads=n_threads, flash_attn=flash_attn)
    contexts = new_contexts(model, own, context)
    return answer(model, requests, contexts, n_predict, vectors, n_parallel=n_parallel, **asked)
