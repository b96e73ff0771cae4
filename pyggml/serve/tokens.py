"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .http import Json, dumps
from .long_json import long_json
from .schemas import DetokenizeBody, TokenizeBody
from .service import Service, service_of


async def tokenize(request: Request) -> Response:
    """POST /tokenize."""
    service = service_of(request)
    body = await service.read(request, TokenizeBody.model_validate)
    shown = await service.prepared(lambda: _tokens(service, body))
    return shown if isinstance(shown, Response) else await long_json(shown)


def _tokens(service: Service, body: TokenizeBody) -> Response | dict[str, Any]:
    vocab = service.model.vocab
    if isinstance(body.content, str):
        ids = vocab.tokenize(body.content, bool(body.add_special), body.parse_special is not False)
    else:
        (ids,) = service.prompts(body.content or [""], bool(body.add_special))[:1]
    if not body.with_pieces:
        return {"tokens": ids}
    # Each token is written once: an object for each of millions takes gigabytes, and holds up all others for seconds.
    shown = {i: dumps({"id": i, "piece": _piece(vocab.token_to_piece(i, special=True))}) for i in set(ids)}
    return Response(b'{"tokens":[' + b",".join([shown[i] for i in ids]) + b"]}", media_type=Json.media_type)


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


async def detokenize(request: Request) -> Response:
    """POST /detokenize."""
    service = service_of(request)
    body = await service.read(request, DetokenizeBody.model_validate)
    return Json({"content": await service.prepared(lambda: service.model.detokenize(body.tokens, False, True))})
