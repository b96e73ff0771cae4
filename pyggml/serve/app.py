"""The application: which function answers which path, and what becomes of errors."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import Lifespan

from pyggml.errors import ClosedError, ModelError
from pyggml.llm.model import Model, load_model

from . import activations, anthropic, embeddings, inside, native, openai, responses, slots, speech, tokens
from .batches import Batches
from .callers import callers
from .errors import HTTPError, of_request
from .http import Json, error_response
from .options import Preset, ServeOptions
from .router import Load, Router
from .service import Service
from .static import PageFiles

Endpoint = Callable[[Request], Awaitable[Response]]
PAGE = Path(__file__).with_name("page")
_GET: dict[str, Endpoint] = {
    "/health": slots.health,
    "/v1/health": slots.health,
    "/metrics": slots.metrics,
    "/slots": slots.slots,
    "/models": openai.models,
    "/v1/models": openai.models,
    "/v1/models/{id:path}": openai.model,
}
_POST: dict[str, Endpoint] = {
    "/tokenize": tokens.tokenize,
    "/detokenize": tokens.detokenize,
    "/apply-template": openai.apply_template,
    "/completion": native.completion,
    "/completions": native.completion,
    "/infill": native.infill,
    "/v1/completions": openai.completions,
    "/chat/completions": openai.chat_completions,
    "/v1/chat/completions": openai.chat_completions,
    "/v1/chat/completions/control": openai.control,
    "/chat/completions/input_tokens": openai.input_tokens,
    "/v1/chat/completions/input_tokens": openai.input_tokens,
    "/v1/responses/input_tokens": responses.input_tokens,
    "/responses/input_tokens": responses.input_tokens,
    "/v1/responses": responses.responses,
    "/responses": responses.responses,
    "/v1/messages": anthropic.messages,
    "/v1/messages/count_tokens": anthropic.count_tokens,
    "/embedding": embeddings.embedding,
    "/embeddings": embeddings.embedding,
    "/v1/embeddings": embeddings.embeddings,
    "/rerank": embeddings.rerank,
    "/reranking": embeddings.rerank,
    "/v1/rerank": embeddings.rerank,
    "/v1/reranking": embeddings.rerank,
    "/v2/rerank": embeddings.rerank,
    "/v1/activations": activations.activations,
    "/v1/inside": inside.inside,
    "/v1/audio/transcriptions": speech.transcriptions,
    "/audio/transcriptions": speech.transcriptions,
    "/v1/audio/translations": speech.translations,
    "/slots/{id}": slots.slot_action,
}
_BOTH: dict[str, Endpoint] = {"/props": slots.props, "/lora-adapters": slots.lora_adapters}
_REFUSED = {  # llama-server's paths that are not served here: the methods, and why
    "/v1/stream": (["GET", "DELETE"], "a stream belongs to its connection"),
    "/v1/streams/lookup": (["POST"], "a stream belongs to its connection"),
    "/cors-proxy": (["GET", "POST"], "this server fetches nothing for pages"),
    "/tools": (["GET", "POST"], "this server runs no tools: those of a request go to the client"),
    "/models": (["POST", "DELETE"], "nothing is downloaded or deleted: models are files of --models-dir"),
    "/models/sse": (["GET"], "GET /models says which models are loaded"),
    "/models/load": (["POST"], "there is one model; --models-dir serves those of a folder"),
    "/models/unload": (["POST"], "there is one model; --models-dir serves those of a folder"),
}
_PUBLIC = {"/health", "/v1/health", "/models", "/v1/models", "/v1/models/{id:path}"}  # paths that need no key


def application(
    model: Model | str | os.PathLike[str] | None, options: ServeOptions, load: Load, presets: Mapping[str, Preset]
) -> Starlette:
    """See `create_app`."""
    if options.models_dir is not None or presets:
        if model is not None:
            raise ModelError("models_dir and presets: the models of a folder, or of presets, are served, and no other")
        return _routed(Router(options, load, _of_service, presets=presets), options)
    model = model if isinstance(model, Model) else load_model(model)
    if options.sleep_idle_seconds > 0:
        return _routed(Router(options, load, _of_service, model), options)
    service = Service(model, options)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            service.thread.stop()

    app = _with_handlers(_routes(), options, lifespan)
    app.state.service, app.state.cut = service, service.thread.cut
    return app


def _of_service(service: Service) -> Starlette:
    """The application of one of several models, behind a router that serves the page, and knows the keys."""
    options = replace(service.options, ui=False, batches_dir=None, api_prefix="", api_key=None, api_key_file=None)
    app = _with_handlers(_routes(), options, None)
    app.state.service = service
    return app


def _routed(router: Router, options: ServeOptions) -> Starlette:
    """The application with a router."""
    routes: list[BaseRoute] = [Route(path, _alive, methods=["GET"]) for path in ("/health", "/v1/health")]
    routes += [Route(path, router.models, methods=["GET"]) for path in ("/models", "/v1/models")]
    routes += [Route("/v1/models/{id:path}", router.model, methods=["GET"])]
    routes += [Route("/models/load", router.load_model, methods=["POST"])]
    routes += [Route("/models/unload", router.unload_model, methods=["POST"])]
    for paths, methods in ((_GET, ["GET"]), (_POST, ["POST"]), (_BOTH, ["GET", "POST"])):
        routes += [Route(path, router, methods=methods) for path in paths]
    app = _with_handlers(routes, options, router.running)
    app.state.cut = router.cut
    return app


async def _alive(request: Request) -> Response:
    return Json({"status": "ok"})


def _routes() -> list[BaseRoute]:
    """The paths of one model."""
    routes: list[BaseRoute] = [Route(path, function, methods=["GET"]) for path, function in _GET.items()]
    routes += [Route(path, function, methods=["POST"]) for path, function in _POST.items()]
    routes += [Route(path, function, methods=["GET", "POST"]) for path, function in _BOTH.items()]
    return routes


def _with_handlers(routes: list[BaseRoute], options: ServeOptions, lifespan: Lifespan[Starlette] | None) -> Starlette:
    """An application with these paths, batches and the page."""
    inner = None
    if options.batches_dir is not None:
        inner = Starlette(routes=list(routes), exception_handlers=_ON)
        batches = Batches(options.batches_dir, inner, options.n_parallel, options.timeout)
        routes += batches.routes()
        lifespan = _both(lifespan, batches)
    for path, (methods, why) in _REFUSED.items():
        routes.append(Route(path, _refuser(why), methods=methods))
    guarded = [r for r in routes if isinstance(r, Route) and r.path not in _PUBLIC]
    middleware = callers(options, [Route(options.api_prefix.rstrip("/") + r.path, r.endpoint) for r in guarded])
    if options.ui:
        routes.append(Mount("/", PageFiles(_page(options), strict=options.path is None)))
    if options.api_prefix:
        routes = [Mount(options.api_prefix.rstrip("/"), routes=routes)]
    app = Starlette(routes=routes, lifespan=lifespan, middleware=middleware, exception_handlers=_ON)
    app.state.prefix = options.api_prefix.rstrip("/")
    app.state.read_at = 0.0  # when the next long body may be read
    app.state.n_bodies = app.state.n_coming = 0  # bodies that have not come whole, and their bytes so far
    app.router.redirect_slashes = False  # as llama-server; and the address of a redirect needs a query in UTF-8
    if inner is not None:
        inner.state = app.state
    return app


def _refuser(why: str) -> Endpoint:
    async def refuse(request: Request) -> Response:
        raise HTTPError(501, f"{request.method} {request.scope['path']}: {why}")

    return refuse


def _both(outer: Lifespan[Starlette] | None, batches: Batches) -> Lifespan[Starlette]:
    """A lifespan in which batches are answered; they end before the engine does."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        assert outer is not None, "an application with batches is no part of another"
        async with outer(app), batches.running(app):
            yield

    return lifespan


def _page(options: ServeOptions) -> str:
    folder = options.path or str(PAGE)
    if not os.path.isdir(folder):
        raise ModelError(f"path: there is no folder {folder!r:.80}")
    return folder


# -- errors -----------------------------------------------------------------------------------------------------------


async def _on_error(request: Request, e: Exception) -> Response:
    assert isinstance(e, HTTPError)
    if "/v1/messages" in request.scope["path"]:
        return anthropic.error_response(e)
    return error_response(e)


async def _on_route(request: Request, e: Exception) -> Response:
    assert isinstance(e, HTTPException)
    prefix, path = request.app.state.prefix, request.scope["path"]  # `url` fails when its query is no UTF-8
    if e.status_code in (404, 405):  # the page's files are looked for at all paths that are no endpoint's
        known = path in {prefix + p for p in (*_GET, *_POST)}
        code, said = (405, f"{path} has no {request.method}") if known else (404, "File Not Found")
        return error_response(HTTPError(code, said))
    return error_response(HTTPError(e.status_code, e.detail))


async def _on_gone(request: Request, e: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_fault(request: Request, e: Exception) -> Response:
    return await _on_error(request, of_request(e))


_ON: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    HTTPError: _on_error,
    HTTPException: _on_route,
    ClientDisconnect: _on_gone,
    # What a request may cause is named: Starlette logs an exception that only `Exception` covers as the server's fault.
    ClosedError: _on_fault,
    RecursionError: _on_fault,
    ValidationError: _on_fault,
    Exception: _on_fault,
}
