"""Errors as JSON, in the shape of llama-server and OpenAI: {"error": {"code", "message", "type"}}."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from pyggml.errors import Aborted, BackendError, ClosedError, GGMLError, GGUFError, SamplerError
from pyggml.gguf_io.atomic_file import FULL

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class HTTPError(Exception):
    """What goes to a client in the place of an answer. `more`: further members of the error."""

    def __init__(self, code: int, message: str, type: str | None = None, **more: Any) -> None:
        super().__init__(message)
        self.code, self.message, self.more = code, message, more
        self.type = type or _TYPES.get(code, "invalid_request_error" if code < 500 else "server_error")

    @property
    def json(self) -> dict[str, Any]:
        """The error object."""
        return {"error": {"code": self.code, "message": self.message, "type": self.type, **self.more}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that go with it."""
        if self.code == 503:
            return {"Retry-After": "1"}
        return {"WWW-Authenticate": "Bearer"} if self.code == 401 else {}


def too_long(n_prompt: int, n_ctx: int) -> HTTPError:
    """The error about a prompt that does not fit a slot."""
    said = f"the request ({n_prompt} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it"
    return HTTPError(400, said, "exceed_context_size_error", n_prompt_tokens=n_prompt, n_ctx=n_ctx)


def no_model(name: object, there: str = "") -> HTTPError:
    """The error about a model that is not there. `there`: what else is said."""
    return HTTPError(404, f"model {name!r:.80} not found{there}")


def of_request(e: Exception) -> HTTPError:
    """The error of a request that cannot be read or begun."""
    match e:
        case HTTPError():
            return e
        case ValidationError():
            found = [f"{'.'.join(map(str, x['loc']))}: {x['msg']}" for x in e.errors(include_url=False)]
            return HTTPError(400, "; ".join(found[:5]) or "the request makes no sense")
        case Aborted() | ClosedError():  # the model was unloaded while the request was under way
            return stopping()
        case GGUFError() | BackendError():  # the model's file is lost, or the machine fails
            return HTTPError(500, " ".join(str(e).split()))
        case GGMLError():
            return HTTPError(400, " ".join(str(e).split()))
        case RecursionError():
            return HTTPError(400, "the request is nested too deep")
        case OSError() if e.errno in FULL:
            return HTTPError(507, str(e.strerror))
        case MemoryError():  # no 503: that tells clients, and batches, to try again
            return HTTPError(507, "there is not enough memory for this request")
        case _:
            return HTTPError(500, f"{type(e).__name__}: {e}")


def stopping() -> HTTPError:
    """The error of a request that the server has no time for any more."""
    return HTTPError(503, "the server is stopping")


def of_generation(e: Exception) -> HTTPError:
    """The error of a text that had begun. What the request asked for is to blame for a SamplerError alone."""
    if isinstance(e, GGMLError) and not isinstance(e, (SamplerError, Aborted, ClosedError)):
        return HTTPError(500, " ".join(str(e).split()))
    return of_request(e)
