"""Files of a folder: the page."""

from __future__ import annotations

import os

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

_TYPES = {".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}  # systems have other tables of types
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageFiles(StaticFiles):
    """The files of the page. A browser asks each time whether a file has changed (its ETag says so), and, when the
    page is pyggml's own (`strict`), lets it load and ask nothing but this server."""

    def __init__(self, directory: str, strict: bool) -> None:
        super().__init__(directory=directory, html=True)
        self._headers = {"cache-control": "no-cache", "x-content-type-options": "nosniff"}
        if strict:
            self._headers |= {"content-security-policy": _POLICY, "referrer-policy": "no-referrer"}

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """A file, or 304 for one that the browser has."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers.update(self._headers)
        kind = _TYPES.get(os.path.splitext(full_path)[1])
        if kind is not None and "content-type" in response.headers:
            response.headers["content-type"] = kind
        return response
