"""/v1/inside: how a model comes to the next token: what each layer would say, and where its attention looks."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from pyggml.codec import Array
from pyggml.llm.context import LlamaContext
from pyggml.llm.options import ContextOptions
from pyggml.llm.samplers.guidance import log_softmax

from .activations import one_prompt, threads
from .errors import HTTPError, of_request
from .http import Json, until_gone
from .schemas import InsideBody
from .service import Service, service_of

_STREAM, _WEIGHTS = "l_out-", "kq_soft_max_ext-"  # nodes: what a layer gives, and its attention weights
_N_TOP = 1  # tokens of each layer, when nobody says how many
_MAX_TOP = 20


async def inside(request: Request) -> Response:
    """POST /v1/inside. The prompt is evaluated at once, beside the slots; other texts wait for it."""
    service = service_of(request)
    body = await service.read(request, InsideBody.model_validate)
    n_top = _N_TOP if body.n_top is None else body.n_top
    if not 1 <= n_top <= _MAX_TOP:
        raise HTTPError(400, f"n_top must be 1 to {_MAX_TOP}, not {n_top}")
    ids = await one_prompt(service, body.prompt)
    try:
        return Json(await until_gone(request, service.thread.call(lambda: _looked(service, body, ids, n_top))))
    except Exception as e:
        raise of_request(e) from e


def _looked(service: Service, body: InsideBody, ids: list[int], n_top: int) -> dict[str, Any]:
    """The answer. Runs in the engine's thread.

    The logit lens uses the model's own norm and head, whatever they are: in a second evaluation, of as many tokens as
    there are layers, the result of the last layer is replaced by what each layer gave for the prompt's last token.
    """
    model, n = service.model, len(ids)
    stream: dict[int, Array] = {}  # layer -> its result for the last token
    weights: dict[int, Array] = {}  # layer -> attention weights of the last token, for each token of the prompt

    def take(name: str, values: Array) -> None:
        found, at = (stream, _STREAM) if name.startswith(_STREAM) else (weights, _WEIGHTS)
        if (layer := name.removeprefix(at)).isdecimal():
            found[int(layer)] = np.array(values[-1] if found is stream else values[:, -1, :n].mean(0), np.float32)

    size = max(n, model.hparams.n_layer)
    options: ContextOptions = {"n_batch": size, "n_ubatch": size, **threads(service)}
    with ExitStack() as stack:
        ctx = stack.enter_context(LlamaContext(model, size, **options))
        ctx.set_loras(service.adapters(body.lora) or ())
        if n > 1:
            ctx.decode(ids[:-1])
        with model.tap(_STREAM + "*", _WEIGHTS + "*", callback=take):
            ctx.decode(ids[-1:])
        if not stream:
            raise HTTPError(400, f"this model has no nodes that are called {_STREAM}*")
        layers = sorted(stream)
        rows = np.stack([stream[layer] for layer in layers])
        ctx.memory.clear()
        with model.edit(f"{_STREAM}{layers[-1]}", lambda values: rows):
            ctx.decode([ids[-1]] * len(layers), logits="all")
        logprobs = np.stack([log_softmax(row) for row in ctx.logits])
    best = np.argsort(-logprobs, axis=-1, kind="stable")[:, :n_top]

    def token(i: int) -> dict[str, Any]:
        return {"id": i, "token": model.vocab.token_to_piece(i, special=True).decode("utf-8", "replace")}

    def said(row: int) -> list[dict[str, Any]]:
        return [{**token(i), "logprob": logprobs.item(row, i)} for i in best[row].tolist()]

    return {
        "tokens": [token(i) for i in ids],
        "layers": [{"layer": layer, "top": said(row)} for row, layer in enumerate(layers)],
        "attention": [{"layer": layer, "weights": weights[layer].tolist()} for layer in sorted(weights)],
    }
