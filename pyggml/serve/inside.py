"""/v1/inside: how a model comes to the next token: what each layer would say, and where its attention looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from pyggml.codec import Array
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.generate.media_chat import split_messages
from pyggml.llm.media_prompt import PlacedMedia, features_of, media_token
from pyggml.llm.model import Model
from pyggml.llm.options import ContextOptions
from pyggml.llm.samplers.guidance import log_softmax
from pyggml.media import Features

from .activations import check_length, one_prompt, threads
from .errors import HTTPError, of_request
from .http import Json, until_gone
from .media import with_media
from .openai import chat_of
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
    asked = (
        _Asked(await one_prompt(service, body.prompt))
        if body.messages is None
        else await service.prepared(lambda: _chat(service, body))
    )
    try:
        return Json(await until_gone(request, service.thread.call(lambda: _looked(service, body, asked, n_top))))
    except Exception as e:
        raise of_request(e) from e


@dataclass(frozen=True)
class _Asked:
    """The tokens that are looked at, what they are besides their ids, and which of them are pictures."""

    ids: list[int]
    media: PlacedMedia | None = None
    pictures: Sequence[dict[str, int]] = ()

    def batch(self, first: int, last: int) -> Batch:
        """The tokens from `first` up to `last`."""
        batch = Batch.prompt(self.ids[first:last], first)
        rows = () if self.media is None else self.media.rows[first:last]
        batch.media = {i: row for i, row in enumerate(rows) if row is not None}
        return batch


def _chat(service: Service, body: InsideBody) -> _Asked:
    """A chat, up to the reply or up to the end of one that was begun."""
    chat = chat_of(service, body)
    check_length(chat.ids)
    if chat.media is None:
        return _Asked(chat.ids)
    things = split_messages(with_media(service, body.messages))[1]
    pictures = [thing for media, thing in things if media == "image"]
    return _Asked(chat.ids, chat.media, _places(service.model, chat.ids, pictures))


def _places(model: Model, ids: Sequence[int], pictures: Sequence[Any]) -> list[dict[str, int]]:
    """Where each picture is among the tokens: its first token, how many there are up to its last (with what stands
    between its rows), and the lines and columns of its rows; both are 0 for a picture in several tiles."""
    token = media_token(model)
    at = [i for i, t in enumerate(ids) if t == token]
    found: list[dict[str, int]] = []
    for picture in pictures:
        features = features_of(model, "image", picture)
        rows, at = at[: len(features.rows)], at[len(features.rows) :]
        lines, columns = _grid(model, picture, features, rows)
        found.append({"first": rows[0], "n": rows[-1] - rows[0] + 1, "lines": lines, "columns": columns})
    return found


def _grid(model: Model, picture: Any, features: Features, rows: Sequence[int]) -> tuple[int, int]:
    """The lines and columns of a picture's rows, whose tokens stand at `rows`; (0, 0) when they are several tiles."""
    n = len(rows)
    if features.grid is not None:
        return features.grid[1:] if features.grid[0] == 1 else (0, 0)
    gaps = [b - a for a, b in pairwise(rows)]
    if set(gaps) == {1, 2}:  # a token at the end of each line
        columns = gaps.index(2) + 1
        return (n // columns, columns) if n % columns == 0 and gaps.count(2) == n // columns - 1 else (0, 0)
    tiles = np.shape(model.process_image(picture).get("pixel_values", ()))
    one = math.isqrt(n)
    return (one, one) if one * one == n and set(gaps) <= {1} and (len(tiles) < 4 or tiles[0] == 1) else (0, 0)


def _looked(service: Service, body: InsideBody, asked: _Asked, n_top: int) -> dict[str, Any]:
    """The answer. Runs in the engine's thread.

    The logit lens uses the model's own norm and head, whatever they are: in a second evaluation, of as many tokens as
    there are layers, the result of the last layer is replaced by what each layer gave for the prompt's last token.
    """
    model, ids, n = service.model, asked.ids, len(asked.ids)
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
            ctx.decode(asked.batch(0, n - 1))
        with model.tap(_STREAM + "*", _WEIGHTS + "*", callback=take):
            ctx.decode(asked.batch(n - 1, n))
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
        "pictures": list(asked.pictures),
        "layers": [{"layer": layer, "top": said(row)} for row, layer in enumerate(layers)],
        "attention": [{"layer": layer, "weights": weights[layer].tolist()} for layer in sorted(weights)],
    }
