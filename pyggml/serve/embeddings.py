"""Vectors of texts: /v1/embeddings, /embedding; and scores of documents: /rerank."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from pyggml import limits
from pyggml.llm.embed import embed_tokens, rank_pairs
from pyggml.llm.openai.request import new_id
from pyggml.types import Floats

from .errors import HTTPError, of_request, too_long
from .http import Json, until_gone
from .long_json import long_json
from .schemas import EmbeddingBody, RerankBody
from .service import Service, check_number, service_of

_TEXTS = 16  # that are embedded between two steps of the engine


async def embeddings(request: Request) -> Response:
    """POST /v1/embeddings."""
    service = service_of(request)
    body = await service.read(request, EmbeddingBody.model_validate)
    if _pooling(service) == "none":
        raise HTTPError(400, "Pooling type 'none' is not OAI compatible. Please use a different pooling type")
    if body.encoding_format not in (None, "float", "base64"):
        raise HTTPError(400, "The format to return the embeddings in. Can be either float or base64")
    if body.dimensions is not None and body.dimensions != service.model.hparams.n_embd:
        raise HTTPError(400, f"dimensions: the model has {service.model.hparams.n_embd}, and no others")
    ids, rows = await _embedded(request, service, body)
    n = sum(map(len, ids))
    coded = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": i, "embedding": _base64(row) if coded else row} for i, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": n, "total_tokens": n}
    return await long_json({"object": "list", "model": service.name, "data": data, "usage": usage})


async def embedding(request: Request) -> Response:
    """POST /embedding, /embeddings: llama-server's own shape."""
    service = service_of(request)
    _, rows = await _embedded(request, service, await service.read(request, EmbeddingBody.model_validate))
    return await long_json([{"index": i, "embedding": np.atleast_2d(row)} for i, row in enumerate(rows)])


async def rerank(request: Request) -> Response:
    """POST /rerank, /v1/rerank; /v2/rerank for Cohere's clients. With `texts` instead of `documents` the answer has
    TEI's shape."""
    service = service_of(request)
    body = await service.read(request, RerankBody.model_validate)
    documents = [_text_of(d) for d in body.documents or ()] if body.texts is None else body.texts
    if not body.query:
        raise HTTPError(400, '"query" must be provided')
    if not documents:
        raise HTTPError(400, '"documents" must be a non-empty string array')
    check_number(len(documents))
    query = body.query
    if len(query) * len(documents) > limits.REQUEST_BYTES:
        raise HTTPError(
            413, f"the query, with each of {len(documents)} documents, is longer than {limits.REQUEST_BYTES}"
        )
    pairs = await service.prepared(lambda: rank_pairs(service.model, query, documents))
    ids, rows = await _rows(request, service, pairs, lambda part: service.model.embed(part, "rank", **_run(service)))
    n = sum(map(len, ids))
    key = "relevance_score" if body.texts is None else "score"
    found: list[dict[str, Any]] = [{"index": i, key: float(row[0])} for i, row in enumerate(rows)]
    if body.texts is None and body.return_documents:
        found = [{**x, "document": {"text": documents[x["index"]]}} for x in found]
    if body.texts is not None and body.return_text:
        found = [{**x, "text": documents[x["index"]]} for x in found]
    found = sorted(found, key=lambda x: -x[key])[: max(body.top_n, 0) if body.top_n is not None else None]
    if body.texts is not None:
        return Json(found)
    usage = {"prompt_tokens": n, "total_tokens": n}
    units = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
    about = {"id": new_id("rerank"), "model": service.name, "object": "list", "meta": units}
    return Json({**about, "usage": usage, "results": found})


def _text_of(document: str | dict[str, Any]) -> str:
    """A document, as Jina and Cohere have it: text, or an object with a text."""
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise HTTPError(400, '"documents": a document is text, or an object with a text')
    return text


def _pooling(service: Service) -> str:
    """How texts are pooled: as the server was told, as the file says, or by the mean."""
    told = service.options.pooling or service.model.hparams.pooling
    return "mean" if service.options.pooling is None and told == "none" else told


def _run(service: Service) -> dict[str, Any]:
    return {"context": {k: v for k, v in service.options.context.items() if k not in ("n_batch", "n_ubatch")}}


async def _embedded(request: Request, service: Service, body: EmbeddingBody) -> tuple[list[list[int]], list[Floats]]:
    """The tokens and the vectors of the texts of a request."""
    given = body.input if body.input is not None else body.content
    if given is None:
        raise HTTPError(400, '"input" or "content" must be provided')
    ids = await service.prepared(lambda: service.prompts(given))
    pooling = _pooling(service)
    n_rows = sum(map(len, ids)) if pooling == "none" else len(ids)
    if n_rows * service.model.hparams.n_embd > (most := limits.REQUEST_NUMBERS):
        raise HTTPError(413, f"the vectors of one request have at most {most} numbers: send fewer or shorter texts")
    normalize = 2.0 if body.embd_normalize is None else body.embd_normalize
    if pooling == "none":
        return await _rows(
            request, service, ids, lambda part: [embed_tokens(service.model, i, **_run(service)) for i in part]
        )
    return await _rows(
        request, service, ids, lambda part: service.model.embed(part, pooling, normalize, **_run(service))
    )


async def _rows(
    request: Request, service: Service, ids: list[list[int]], embed: Callable[[list[list[int]]], Iterable[Floats]]
) -> tuple[list[list[int]], list[Floats]]:
    """What `embed` gives for texts, some at a time, so that texts that are continued go on between them."""
    check_number(len(ids))
    room = service.n_slot or service.options.n_ctx or service.model.hparams.n_ctx_train
    if (n := max(map(len, ids))) > room:
        raise too_long(n, room)

    async def work() -> list[Floats]:
        rows: list[Floats] = []
        for i in range(0, len(ids), _TEXTS):
            part = ids[i : i + _TEXTS]
            rows += await service.thread.call(lambda part=part: list(embed(part)))
        return rows

    try:
        return ids, await until_gone(request, work())
    except Exception as e:
        raise of_request(e) from e


def _base64(row: Floats) -> str:
    return base64.b64encode(np.ascontiguousarray(row, "<f4").tobytes()).decode()
