"""/v1/activations: what named nodes of a prompt's graph give, as a file of arrays, also when some are changed."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from pyggml import limits
from pyggml.codec import Array
from pyggml.llm.context import LlamaContext
from pyggml.llm.options import ContextOptions

from .errors import HTTPError, of_request, too_long
from .http import until_gone
from .schemas import ActivationsBody, EditBody
from .service import Service, service_of

_TYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64"}  # of NumPy: those of safetensors


async def activations(request: Request) -> Response:
    """POST /v1/activations. The whole prompt is evaluated at once, beside the slots; other texts wait for it."""
    service = service_of(request)
    body = await service.read(request, ActivationsBody.model_validate)
    if not body.nodes:
        raise HTTPError(400, "nodes: names of nodes, or patterns such as l_out-*")
    if body.format not in (None, "safetensors", "npy"):
        raise HTTPError(400, f"format: safetensors or npy, not {body.format!r:.60}")
    _check_names(body)
    ids = await one_prompt(service, body.prompt)
    try:
        found = await until_gone(request, service.thread.call(lambda: _evaluated(service, body, ids)))
    except Exception as e:
        raise of_request(e) from e
    if body.format != "npy":
        return Response(_safetensors(found, ids), media_type="application/octet-stream")
    if len(found) != 1:
        raise HTTPError(400, f"npy holds one node, not {len(found)}: ask for one, or for safetensors")
    file = io.BytesIO()
    np.save(file, next(iter(found.values())), allow_pickle=False)
    return Response(file.getvalue(), media_type="application/octet-stream")


def _check_names(body: ActivationsBody) -> None:
    """Raises HTTPError for too many names: each is compared with each node, while other texts wait."""
    most, edits = limits.ACTIVATION_NAMES, body.edits or ()
    names = [*(body.nodes or ()), *(e.node for e in edits)]
    if len(names) > most or any(len(name) > most for name in names):
        raise HTTPError(400, f"nodes and edits: at most {most} names, of at most {most} characters")


async def one_prompt(service: Service, prompt: Any) -> list[int]:
    """The tokens of a prompt whose nodes are looked at. Raises HTTPError for none, several, and too long ones."""
    prompts = await service.prepared(lambda: service.prompts(prompt))
    if len(prompts) != 1:
        raise HTTPError(400, f"prompt: one text, not {len(prompts)}")
    check_length(prompts[0])
    service.check_tokens(prompts[0])
    return prompts[0]


def check_length(ids: Sequence[int]) -> None:
    """Raises HTTPError for a prompt without tokens, and for one that is too long to be looked at."""
    if not ids:
        raise HTTPError(400, "the prompt is empty")
    if len(ids) > limits.ACTIVATION_TOKENS:
        raise too_long(len(ids), limits.ACTIVATION_TOKENS)


def threads(service: Service) -> ContextOptions:
    """The server's number of threads, for a context of one prompt."""
    n_threads = service.options.context.get("n_threads")
    return {} if n_threads is None else {"n_threads": n_threads}


def _evaluated(service: Service, body: ActivationsBody, ids: list[int]) -> Mapping[str, Array]:
    """The values of the nodes by name. Runs in the engine's thread."""
    found: dict[str, Array] = {}

    def take(name: str, values: Array) -> None:
        found[name] = np.array(values, order="C")
        if sum(a.nbytes for a in found.values()) > limits.ACTIVATION_BYTES:
            raise HTTPError(400, f"the nodes have more than {limits.ACTIVATION_BYTES} bytes: ask for fewer")

    n_edited = 0

    def counted(change: Callable[[Array], Array]) -> Callable[[Array], Array]:
        def counts(values: Array) -> Array:
            nonlocal n_edited
            n_edited += values.nbytes
            if n_edited > limits.ACTIVATION_EDITED:
                raise HTTPError(400, f"edits change more than {limits.ACTIVATION_EDITED} bytes: ask for fewer")
            return change(values)

        return counts

    options: ContextOptions = {"n_batch": len(ids), "n_ubatch": len(ids), **threads(service)}
    with ExitStack() as stack:
        ctx = stack.enter_context(LlamaContext(service.model, len(ids), **options))
        ctx.set_loras(service.adapters(body.lora) or ())
        edits = [stack.enter_context(service.model.edit(e.node, counted(_change(e)))) for e in body.edits or ()]
        stack.enter_context(service.model.tap(*(body.nodes or ()), callback=take))
        ctx.decode(ids)
        for wanted, edit in zip(body.edits or (), edits, strict=True):
            if not edit.n:
                raise HTTPError(400, f"edits: no node is called {wanted.node!r:.60}")
    if not found:
        raise HTTPError(400, f"nodes: no node is called {' or '.join(body.nodes or ())!r:.80}")
    return found


def _change(e: EditBody) -> Callable[[Array], Array]:
    """The function that changes the rows of some tokens: times `scale`, plus `add`."""
    if bad := next((t for t in e.tokens or () if abs(t) > limits.ACTIVATION_TOKENS), None):
        raise HTTPError(400, f"edits: no prompt has a token {bad!r:.60}")
    rows = slice(None) if e.tokens is None else np.array(e.tokens, np.int64)
    add = np.array(0.0 if e.add is None else e.add, np.float32)
    scale = np.float32(1.0 if e.scale is None else e.scale)

    def change(values: Array) -> Array:
        values[rows] = values[rows] * scale + add
        return values

    return change


def _safetensors(arrays: Mapping[str, Array], ids: list[int]) -> bytes:
    """A file with the arrays and, as metadata, the tokens of the prompt."""
    header: dict[str, Any] = {"__metadata__": {"tokens": json.dumps(ids)}}
    at, parts = 0, list[bytes]()
    for name, array in arrays.items():
        data = array.tobytes()
        shape = {"dtype": _TYPES[array.dtype.name], "shape": list(array.shape)}
        header[name] = {**shape, "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return b"".join((struct.pack("<Q", len(head)), head, *parts))
