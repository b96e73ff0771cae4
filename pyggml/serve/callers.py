"""Who may call the server: pages of which origins, and with which keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import HTTPError
from .http import error_response
from .options import Keys, ServeOptions


def callers(o: ServeOptions, guarded: Sequence[Route]) -> list[Middleware]:
    """What requests pass before they come to the paths; those of `guarded` need a key by GET, too."""
    origins = [x.strip() for x in o.cors_origins.split(",") if x.strip()]
    local = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?" if "localhost" in origins else None
    cors = Middleware(
        CORSMiddleware,
        allow_origins=[x for x in origins if x != "localhost"],
        allow_origin_regex=local,
        allow_methods=[x.strip() for x in o.cors_methods.split(",")],
        allow_headers=[x.strip() for x in o.cors_headers.split(",")],
    )
    passed = [cors]
    if "*" not in origins:
        passed.append(Middleware(_OfOrigins, origins=origins, local=local))
    if o.keys:
        passed.append(Middleware(_WithKey, keys=o.keys, guarded=guarded))
    return passed


def _headers(scope: Scope) -> dict[bytes, str]:
    return {k.lower(): v.decode("latin-1") for k, v in scope["headers"]}


class _OfOrigins:
    """Refuses requests of pages whose origin is none of `origins`, not matched by `local`, and not this server's. A
    browser sends a form or a text to any server, and only keeps the answer from the page. A page whose name was given
    this machine's address (DNS rebinding) has the server's origin: so that name must be an address, localhost, or that
    of one of the origins."""

    def __init__(self, app: ASGIApp, origins: Sequence[str], local: str | None) -> None:
        self._app, self._origins, self._local = app, origins, local
        self._names = {"localhost", *(urlsplit(x).hostname for x in origins)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 403, or let the request through."""
        if scope["type"] == "http":
            headers = _headers(scope)
            host, origin = headers.get(b"host", ""), headers.get(b"origin")
            if host and not self._is_name(host):
                await error_response(HTTPError(403, f"{host:.80} is no name of this server"))(scope, receive, send)
                return
            if origin is not None and not self._is_allowed(origin, host):
                await error_response(HTTPError(403, f"pages of {origin:.80} may not call"))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_name(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        with suppress(ValueError):
            return bool(ip_address(name))
        return name in self._names

    def _is_allowed(self, origin: str, host: str) -> bool:
        if origin in self._origins or (self._local is not None and re.fullmatch(self._local, origin)):
            return True
        return origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


class _WithKey:
    """Lets requests through that have one of the keys: `Authorization: Bearer KEY` or `X-Api-Key: KEY`. By GET only the
    paths of `guarded` need a key: others are public, or the page's. Whether a path is one of these says the router's
    own comparison: to it /slots with a line feed behind is /slots, too."""

    def __init__(self, app: ASGIApp, keys: Keys, guarded: Sequence[Route]) -> None:
        self._app, self._keys, self._guarded = app, keys, guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or let the request through."""
        if scope["type"] == "http" and self._is_guarded(scope):
            headers = _headers(scope)
            kind, _, key = headers.get(b"authorization", "").partition(" ")
            key = key.strip() if kind.lower() == "bearer" else headers.get(b"x-api-key", "")
            if not self._keys.has(key):
                await error_response(HTTPError(401, "Invalid API Key"))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_guarded(self, scope: Scope) -> bool:
        by_get = scope["method"] in ("GET", "HEAD")
        return not by_get or any(route.matches(scope)[0] is not Match.NONE for route in self._guarded)
