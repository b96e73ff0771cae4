"""Several models behind one address: the `model` of a request chooses, and models are loaded and unloaded as needed.

Each model has an application of its own (`app.py`), which answers the request; the router reads the name and hands on.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyggml.errors import GGMLError, ModelError
from pyggml.llm.model import Model

from .errors import HTTPError, no_model
from .http import Json, json_body, json_object, with_body
from .options import Preset, ServeOptions
from .service import Service

Load = Callable[[str], Model]
_WAKES = {"/props"}  # what asks of a model without naming it, and loads it nevertheless


@dataclass(eq=False)
class Served:
    """A model that can be served. `preset`: options of its own; `n_open`: requests under way; `used`: when the last one
    ended or began."""

    name: str
    path: str
    preset: Preset | None = None
    app: ASGIApp | None = None
    service: Service | None = None
    n_open: int = 0
    used: float = 0.0
    state: str = "unloaded"  # or loading, loaded, sleeping
    failed: bool = False

    @property
    def json(self) -> dict[str, Any]:
        """What /models says of it."""
        shown: dict[str, Any] = {"id": self.name, "object": "model", "owned_by": "pyggml", "path": self.path}
        return {**shown, "status": {"value": self.state, "args": [], **({"failed": True} if self.failed else {})}}


class Router:
    """Keeps at most `models_max` models loaded. When another one is needed, the one that was used least recently is
    unloaded, of those that have nothing to do. One that had nothing to do for `sleep_idle_seconds` is unloaded too.

    make   makes the application of a model
    only   a model that is loaded already, and no other is served then
    presets  further models by name, or options of those of the folder; "*": of models without a preset. Raises
             ModelError for a name without a model
    """

    def __init__(
        self,
        options: ServeOptions,
        load: Load,
        make: Callable[[Service], Starlette],
        only: Model | None = None,
        presets: Mapping[str, Preset] | None = None,
    ) -> None:
        self._options, self._load, self._make = options, load, make
        self._presets = presets or {}
        self._lock = asyncio.Lock()
        self._known: dict[str, Served] = {}
        self._single = only is not None
        for name in self._presets.keys() - self.known.keys() - {"*"}:
            raise ModelError(f"the preset {name!r:.80} names no model, and models_dir has none of this name")
        if self._presets and not self.known:
            raise ModelError("the presets name no model")
        if only is not None:
            name = options.name_of(only.path)
            self._known[name] = self._begun(Served(name, only.path), only)

    @property
    def known(self) -> Mapping[str, Served]:
        """The models by name; files that came or went since are looked for."""
        folder = self._options.models_dir
        if not self._single:
            found = {} if folder is None else models_in(folder)
            found |= {name: p.path for name, p in self._presets.items() if p.path is not None}
            for name, path in found.items():
                self._known.setdefault(name, Served(name, path, self._presets.get(name, self._presets.get("*"))))
            gone = [n for n, m in self._known.items() if n not in found and m.state == "unloaded"]
            for name in gone:
                del self._known[name]
        return self._known

    @asynccontextmanager
    async def running(self, app: Starlette) -> AsyncGenerator[None]:
        """The lifespan of the application."""
        for m in [m for m in self.known.values() if m.preset is not None and m.preset.at_start]:
            with suppress(HTTPError):  # /models shows that it failed
                await self.load(m)
        idle = asyncio.ensure_future(self._sleep()) if self._options.sleep_idle_seconds > 0 else None
        try:
            yield
        finally:
            if idle is not None:
                idle.cancel()
            for m in tuple(self._known.values()):
                if m.service is not None:
                    await self._unload(m)

    def cut(self) -> None:
        """Cut all answers under way, without waiting: see `EngineThread.cut`."""
        for m in self._known.values():
            if m.service is not None:
                m.service.thread.cut()

    # -- requests ---------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on to the model that it names."""
        request = Request(scope, receive)
        name, taken = request.query_params.get("model"), list[Message]()
        if request.method not in ("GET", "HEAD") and _has_json(request):

            async def recorded() -> Message:
                taken.append(await receive())
                return taken[-1]

            body = await json_body(Request(scope, recorded), self._options.timeout)
            scope = with_body(scope, body)
            given = cast("dict[str, Any]", body).get("model") if isinstance(body, dict) else None
            name = name if given is None else given
        asks = request.method not in ("GET", "HEAD") or name is not None or scope["path"].endswith(tuple(_WAKES))
        m = await self._wanted(name, asks)

        async def again() -> Message:
            return taken.pop(0) if taken else await receive()

        m.n_open += 1
        try:
            app = m.app
            assert app is not None, m.name
            await app({**scope}, again, send)
        finally:
            m.n_open -= 1
            if asks:
                m.used = time.monotonic()

    async def _wanted(self, name: object, asks: bool) -> Served:
        """The model of a request, loaded. Raises HTTPError."""
        known = self.known
        if self._single:  # it answers to any name
            name = next(iter(known))
        elif name is None:
            loaded = sorted((m for m in known.values() if m.app is not None), key=lambda m: -m.used)
            name = loaded[0].name if loaded else next(iter(known), None)
        if not isinstance(name, str) or name not in known:
            names = ", ".join([*known][:20]) or "none"
            raise no_model(name, f"; there are: {names}")
        m = known[name]
        if m.app is None and not asks:
            raise HTTPError(503, "no model is loaded")
        if m.app is None:
            if not self._options.models_autoload and m.state != "sleeping":
                raise HTTPError(400, f"model {name!r:.80} is not loaded: POST /models/load")
            await self.load(m)
        return m

    # -- loading ----------------------------------------------------------------------------------------------------

    async def load(self, m: Served) -> None:
        """Load a model, unless it is. Raises HTTPError when it cannot be, or when all that are loaded are busy."""
        async with self._lock:
            if m.app is not None:
                return
            most = self._options.models_max
            while most and sum(x.app is not None for x in self._known.values()) >= most:
                idle = [x for x in self._known.values() if x.app is not None and not x.n_open]
                if not idle:
                    raise HTTPError(503, f"all of the {most} models that may be loaded are busy: try again later")
                await self._unload(min(idle, key=lambda x: x.used))
            m.state, load = "loading", self._load if m.preset is None else m.preset.load
            try:
                await run_in_threadpool(lambda: self._begun(m, load(m.path)))
                m.failed = False
            except Exception as e:
                m.state, m.failed = "unloaded", True
                said = " ".join(str(e).split()) if isinstance(e, GGMLError | OSError) else type(e).__name__
                raise HTTPError(500, f"model {m.name!r:.80} cannot be loaded: {said}") from e

    def _begun(self, m: Served, model: Model) -> Served:
        name = self._options.alias if self._single else m.name
        options = self._options if m.preset is None else m.preset.options
        m.service = Service(model, replace(options, alias=name))
        m.app, m.state, m.used = self._make(m.service), "loaded", time.monotonic()
        return m

    async def unload(self, m: Served) -> None:
        """Unload a model; its texts end. Raises HTTPError when it is not loaded."""
        async with self._lock:
            if m.app is None:
                raise HTTPError(400, f"model {m.name!r:.80} is not loaded")
            await self._unload(m)

    async def _unload(self, m: Served, state: str = "unloaded") -> None:
        service, m.app, m.service, m.state = m.service, None, None, state
        if service is not None:
            await run_in_threadpool(lambda: (service.thread.stop(), service.model.close()))

    async def _sleep(self) -> None:
        """Unload, again and again, what nobody has used for long."""
        seconds = self._options.sleep_idle_seconds
        while True:
            await asyncio.sleep(min(1.0, seconds / 4))
            async with self._lock:
                for m in tuple(self._known.values()):
                    if m.app is not None and not m.n_open and time.monotonic() - m.used >= seconds:
                        await self._unload(m, "sleeping")

    # -- /models ----------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """GET /models and /v1/models: all models, and which of them are loaded."""
        data = [_about(m) for m in self.known.values()]
        return Json({"object": "list", "data": data, "models": [{"name": d["id"], "model": d["id"]} for d in data]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}: one of them."""
        name, known = request.path_params["id"], self.known
        if name not in known:
            raise no_model(name)
        return Json(_about(known[name]))

    async def load_model(self, request: Request) -> Response:
        """POST /models/load: answers when the model is loaded."""
        m = await self._named(request)
        if m.app is not None:
            raise HTTPError(400, f"model {m.name!r:.80} is already loaded")
        await self.load(m)
        return Json({"success": True})

    async def unload_model(self, request: Request) -> Response:
        """POST /models/unload."""
        await self.unload(await self._named(request))
        return Json({"success": True})

    async def _named(self, request: Request) -> Served:
        name = (await json_object(request, self._options.timeout)).get("model")
        known = self.known
        if not isinstance(name, str) or name not in known:
            raise no_model(name)
        return known[name]


def _has_json(request: Request) -> bool:
    """Whether a request has a body that may name a model: one with a sound is a form, and some need none."""
    headers = request.headers
    has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
    return has_body and not headers.get("content-type", "").startswith("multipart/")


def _about(m: Served) -> dict[str, Any]:
    from .openai import about

    if m.service is None:
        return m.json | {"created": 0}
    shown = about(m.service)
    return m.json | {name: shown[name] for name in ("created", "meta")}


def models_in(folder: str) -> dict[str, str]:
    """The models of a folder by name: GGUF files (of several parts the first), and folders that have one, or are of
    Hugging Face. Files of projectors (mmproj) are no models of texts. Raises ModelError when it cannot be read."""
    found: dict[str, str] = {}
    try:
        for entry in sorted(os.scandir(folder), key=lambda e: e.name):
            if entry.is_dir():
                files = sorted(f for f in Path(entry.path).glob("*.gguf") if _is_model(f.name))
                if files:
                    found[entry.name] = str(files[0])
                elif os.path.exists(os.path.join(entry.path, "config.json")):
                    found[entry.name] = entry.path
            elif entry.name.endswith(".gguf") and _is_model(entry.name):
                found[entry.name.removesuffix(".gguf")] = entry.path
    except OSError as e:
        raise ModelError(f"models_dir: {e.strerror}: {folder!r:.80}") from None
    return found


def _is_model(name: str) -> bool:
    part = name.removesuffix(".gguf").rpartition("-of-")[0].rpartition("-")[2]
    return "mmproj" not in name and not (part.isdecimal() and int(part) > 1)
