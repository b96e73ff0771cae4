"""What goes on in the server: /health, /props, /metrics, /slots and /lora-adapters."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pyggml.gguf_io.atomic_file import FULL
from pyggml.llm.adapters.active import Scaled
from pyggml.llm.context import LlamaContext
from pyggml.llm.generate.generation import Generation, TextRequest
from pyggml.llm.generate.media_chat import MARKER
from pyggml.llm.samplers import TextParams
from pyggml.llm.state.save_load import load_seq_tokens, save_seq

from .budget import weights_bytes
from .errors import HTTPError, of_generation, of_request, stopping
from .http import Json, json_body, json_object, until_gone
from .native import settings
from .service import FINGERPRINT, Service, service_of

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,200}")


async def health(request: Request) -> Response:
    """GET /health."""
    if service_of(request).thread.stopped:
        raise stopping()
    return Json({"status": "ok"})


async def props(request: Request) -> Response:
    """GET and POST /props."""
    service = service_of(request)
    if request.method == "POST":
        if not service.options.props:
            raise HTTPError(501, "This server does not support changing global properties. Start it with `--props`")
        await json_object(request, service.options.timeout)
        return Json({"success": True})
    options = service.options
    defaults = {"params": settings(options.defaults), "n_ctx": service.n_slot}
    caps = await service.prepared(lambda: service.template_caps)
    return Json(
        {
            "default_generation_settings": defaults,
            "total_slots": service.thread.n_slots,
            "model_alias": service.name,
            "model_ftype": service.file_type,
            "model_path": service.model.path,
            "modalities": {**service.modalities, "video": False},
            "endpoint_slots": options.slots,
            "endpoint_props": options.props,
            "endpoint_metrics": options.metrics,
            "ui": options.ui,
            "ui_settings": {},
            "cors_proxy_enabled": False,
            "media_marker": MARKER,
            "chat_template": service.template.source,
            **({"chat_template_tool_use": tool_use} if (tool_use := service.template.tool_use) else {}),
            "chat_template_caps": caps,
            "has_chat_template": service.has_template,
            "bos_token": _token(service, service.model.vocab.bos),
            "eos_token": _token(service, service.model.vocab.eos),
            "build_info": FINGERPRINT,
            "is_sleeping": False,
        }
    )


def _token(service: Service, token: int | None) -> str:
    return "" if token is None else service.model.vocab.text(token)


async def metrics(request: Request) -> Response:
    """GET /metrics, in Prometheus' text format."""
    service = service_of(request)
    if not service.options.metrics:
        raise HTTPError(501, "This server does not support metrics endpoint. Start it with `--metrics`")
    thread = service.thread
    c = thread.counts
    n_busy = sum(not slot.ended for slot in tuple(thread.engine.slots)) if thread.engine is not None else 0
    rows: list[tuple[str, str, str, float]] = [
        ("prompt_tokens_total", "counter", "Number of prompt tokens processed.", c.n_prompt),
        ("prompt_tokens_cached_total", "counter", "Number of prompt tokens reused from the cache.", c.n_cached),
        ("prompt_seconds_total", "counter", "Prompt process time", c.prompt_seconds),
        ("tokens_predicted_total", "counter", "Number of generation tokens processed.", c.n_predicted),
        ("tokens_predicted_seconds_total", "counter", "Predict process time", c.predicted_seconds),
        ("n_decode_total", "counter", "Total number of decodes", c.n_steps),
        ("n_tokens_max", "counter", "Largest observed n_tokens.", c.n_tokens_max),
        ("spec_decode_num_drafts_total", "counter", "Number of drafts that were evaluated.", c.n_drafts),
        ("spec_decode_num_draft_tokens_total", "counter", "Number of tokens of drafts.", c.n_drafted),
        (
            "spec_decode_num_accepted_tokens_total",
            "counter",
            "Number of tokens of drafts that were right.",
            c.n_accepted,
        ),
        ("n_busy_slots_per_decode", "gauge", "Average number of busy slots per decode", _ratio(c.n_busy, c.n_steps)),
        (
            "prompt_tokens_seconds",
            "gauge",
            "Average prompt throughput in tokens/s.",
            _ratio(c.n_prompt, c.prompt_seconds),
        ),
        (
            "predicted_tokens_seconds",
            "gauge",
            "Average generation throughput in tokens/s.",
            _ratio(c.n_predicted, c.predicted_seconds),
        ),
        ("requests_processing", "gauge", "Number of requests processing.", n_busy),
        ("requests_deferred", "gauge", "Number of requests deferred.", thread.n_waiting),
    ]
    kv = 0 if thread.ctx is None else thread.ctx.memory.nbytes
    held = 0 if service.snapshots is None else service.snapshots.nbytes
    rows += [
        ("memory_weights_bytes", "gauge", "Memory of weights.", weights_bytes(service.model)),
        ("memory_kv_bytes", "gauge", "Memory of K and V of all slots.", kv),
        ("memory_cache_bytes", "gauge", "Memory of texts that slots have no room for.", held),
    ]
    lines = [
        f"# HELP llamacpp:{name} {help}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value:.9g}\n"
        for name, kind, help, value in rows
    ]
    return PlainTextResponse("".join(lines), media_type="text/plain; version=0.0.4")


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


# -- slots ------------------------------------------------------------------------------------------------------------


async def slots(request: Request) -> Response:
    """GET /slots."""
    service = service_of(request)
    if not service.options.slots:
        raise HTTPError(501, "This server does not support slots endpoint. Start it with `--slots`")
    look = service.thread.call(lambda: [_slot(service, i) for i in range(service.thread.n_slots)])
    shown = await until_gone(request, look)
    if request.query_params.get("fail_on_no_slot") and all(s["is_processing"] for s in shown):
        raise HTTPError(503, "no slot available")
    return Json(shown)


def _slot(service: Service, seq: int) -> dict[str, Any]:
    engine = service.thread.engine
    assert engine is not None
    slot = engine.slots[seq] if seq < len(engine.slots) else None
    shown: dict[str, Any] = {"id": seq, "n_ctx": service.n_slot, "speculative": service.guesses, "is_processing": False}
    if slot is None:
        return shown
    g = slot.generation
    params = g.chain.params
    busy = not slot.ended
    shown |= {"is_processing": busy, "n_prompt_tokens": g.n_prompt, "n_prompt_tokens_cache": g.n_past}
    if isinstance(params, TextParams):
        shown["params"] = settings(params)
    left = -1 if g.n_predict < 0 else max(g.n_predict - len(g.ids), 0)
    return {**shown, "next_token": [{"has_next_token": busy, "n_remain": left, "n_decoded": len(g.ids)}]}


async def slot_action(request: Request) -> Response:
    """POST /slots/{id}?action=save, restore or erase: as soon as nothing is under way in that slot."""
    service = service_of(request)
    actions: Mapping[str, Callable[[Service, int, str], dict[str, Any]]] = {
        "save": _save,
        "restore": _restore,
        "erase": _erase,
    }
    action = actions.get(name := request.query_params.get("action", ""))
    if action is None:
        raise HTTPError(400, "Invalid action: it is one of save, restore, erase")
    text = request.path_params["id"]
    if not text.isdecimal() or len(text) > 9 or not int(text) < service.thread.n_slots:
        raise HTTPError(400, f"Invalid slot ID: there are 0 to {service.thread.n_slots - 1}")
    seq, path = int(text), ""
    if name != "erase":
        folder = service.options.slot_save_path
        if folder is None:
            raise HTTPError(501, "This server does not support slots action. Start it with `--slot-save-path`")
        file = (await json_object(request, service.options.timeout)).get("filename")
        if not isinstance(file, str) or not _NAME.fullmatch(file):
            raise HTTPError(400, "Invalid filename")
        path = str(Path(folder) / file)
    try:
        work = service.thread.call(lambda: action(service, seq, path), lambda: not _busy(service, seq))
        return Json(await until_gone(request, work))
    except Exception as e:
        if isinstance(e.__context__, OSError) and e.__context__.errno in FULL:
            raise HTTPError(507, str(e)) from e
        raise (of_generation if name == "save" else of_request)(e) from e  # a failing disk is not the client's fault


def _busy(service: Service, seq: int) -> bool:
    engine = service.thread.engine
    return engine is not None and seq < len(engine.slots) and not engine.slots[seq].ended


def _held(service: Service, seq: int) -> list[int]:
    """The tokens that a slot has evaluated."""
    engine = service.thread.engine
    if engine is None or seq >= len(engine.slots):
        return []
    slot = engine.slots[seq]
    return slot.text[: slot.n_held]


def _hold(service: Service, seq: int, tokens: list[int]) -> None:
    engine = service.thread.engine
    assert engine is not None
    engine.hold(seq, _not_running(service, tokens))


def _adapters(loras: Sequence[Scaled] | None) -> list[tuple[str, float]]:
    """What a file of a slot says of the adapters of its text."""
    return [(lora.digest, scale) for lora, scale in loras or () if scale]


def _not_running(service: Service, tokens: list[int]) -> Generation:
    ctx = service.thread.ctx
    assert ctx is not None
    request = TextRequest(tokens, TextParams(n_predict=0), loras=service.adapters(None))
    return request.start(ctx, len(tokens))


def _save(service: Service, seq: int, path: str) -> dict[str, Any]:
    start, tokens = perf_counter(), _held(service, seq)
    if any(t < 0 for t in tokens):
        raise HTTPError(501, f"slot {seq} holds a picture or a sound: such texts are not saved")
    engine = service.thread.engine
    loras = engine.slots[seq].generation.loras if engine is not None and tokens else None
    save_seq(_context(service), path, seq, tokens, _adapters(loras))
    about = {"id_slot": seq, "filename": os.path.basename(path), "n_saved": len(tokens)}
    return {**about, "n_written": os.path.getsize(path), "timings": {"save_ms": (perf_counter() - start) * 1e3}}


def _restore(service: Service, seq: int, path: str) -> dict[str, Any]:
    start = perf_counter()
    if not os.path.isfile(path):
        raise HTTPError(400, "Unable to restore slot, no available space in KV cache or invalid slot save file")
    size = os.path.getsize(path)
    tokens = load_seq_tokens(_context(service), path, seq, _adapters(service.adapters(None)))
    if len(tokens) > service.n_slot:
        _context(service).memory.seq_rm(seq)
        _hold(service, seq, [])
        raise HTTPError(400, f"the file has {len(tokens)} tokens, a slot has room for {service.n_slot}")
    _hold(service, seq, tokens)
    about = {"id_slot": seq, "filename": os.path.basename(path), "n_restored": len(tokens), "n_read": size}
    return {**about, "timings": {"restore_ms": (perf_counter() - start) * 1e3}}


def _erase(service: Service, seq: int, path: str) -> dict[str, Any]:
    n = len(_held(service, seq))
    _context(service).memory.seq_rm(seq)
    _hold(service, seq, [])
    return {"id_slot": seq, "n_erased": n}


def _context(service: Service) -> LlamaContext:
    ctx = service.thread.ctx
    assert isinstance(ctx, LlamaContext)
    return ctx


# -- adapters ---------------------------------------------------------------------------------------------------------


async def lora_adapters(request: Request) -> Response:
    """GET and POST /lora-adapters: the scales for requests that have none of their own, from now on."""
    service = service_of(request)
    if request.method == "GET":
        scales = enumerate(service.loras)
        return Json([{"id": i, "path": lora.path, "scale": scale} for i, (lora, scale) in scales])
    given = await json_body(request, service.options.timeout)
    if not isinstance(given, list):
        raise HTTPError(400, "Request body must be an array")
    try:
        service.loras = service.adapters(given) or ()  # pyright: ignore[reportUnknownArgumentType]
    except Exception as e:
        raise of_request(e) from e
    return Json({"success": True})
