"""/v1/audio/transcriptions and /v1/audio/translations: what is said in a sound, by Whisper."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pyggml import limits
from pyggml.llm.transcribe import TEMPERATURES, Segment, Transcriber, Transcription

from .errors import HTTPError, of_request
from .forms import read_form
from .http import Json, body_of, until_gone
from .service import service_of

_SHAPES = ("json", "text", "srt", "verbose_json", "vtt")


async def transcriptions(request: Request) -> Response:
    """POST /v1/audio/transcriptions."""
    return await _written(request, "transcribe")


async def translations(request: Request) -> Response:
    """POST /v1/audio/translations: in English."""
    return await _written(request, "translate")


async def _written(request: Request, task: Any) -> Response:
    service = service_of(request)
    if service.model.arch != "whisper":
        raise HTTPError(501, f"This server transcribes nothing: its model is {service.model.arch}, not whisper")
    body = await body_of(request, service.options.timeout, limits.MEDIA_BYTES)
    parts = await service.prepared(lambda: read_form(request.headers.get("content-type", ""), body))
    form = {name: part.data for name, part in parts.items()}
    sound, shape = form.get("file"), _text(form, "response_format") or "json"
    if not sound:
        raise HTTPError(400, "file: a sound is missing")
    if shape not in _SHAPES:
        raise HTTPError(400, f"response_format is one of {', '.join(_SHAPES)}, not {shape!r:.40}")
    if _text(form, "stream") in ("true", "True", "1"):
        raise HTTPError(501, "stream is not supported")
    if len(form.get("prompt", b"")) > (most := limits.SPEECH_PROMPT):
        raise HTTPError(400, f"prompt: at most {most} bytes, of which the last few hundred tokens count")
    temperature = _temperature(_text(form, "temperature"))
    context: Any = {k: v for k, v in service.options.context.items() if k not in ("n_batch", "n_ubatch")}

    def begin() -> Transcriber:
        return Transcriber(
            service.model,
            sound,
            language=_text(form, "language") or None,
            task=task,
            prompt=_text(form, "prompt") or None,
            temperature=temperature,
            context=context,
        )

    async def work() -> Transcription:
        t = await service.prepared(begin)
        segments, found = t.segments(), list[Segment]()
        try:
            while (s := await service.thread.call(lambda: next(segments, None))) is not None:
                found.append(s)  # other requests have their turns between segments
        finally:
            segments.close()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]  # a generator
        return Transcription("".join(s.text for s in found), found, t.language, t.duration)

    try:
        made = await until_gone(request, work())
    except (HTTPError, asyncio.CancelledError):
        raise
    except Exception as e:
        raise of_request(e) from e
    return _answer(made, shape, task)


def _answer(made: Transcription, shape: str, task: str) -> Response:
    text = made.text.strip()
    match shape:
        case "text":
            return PlainTextResponse(text + "\n")
        case "srt":
            return PlainTextResponse(made.srt())
        case "vtt":
            return PlainTextResponse(made.vtt(), media_type="text/vtt")
        case "verbose_json":
            segments = [{"id": i, "seek": 0, **s} for i, s in enumerate(made.as_dict()["segments"])]
            about = {"task": task, "language": made.language, "duration": made.duration}
            return Json({**about, "text": text, "segments": segments})
        case _:
            return Json({"text": text})


def _temperature(text: str) -> float | tuple[float, ...]:
    """0, as when nothing is said: higher ones where a text is doubtful."""
    try:
        value = float(text or 0)
    except ValueError:
        raise HTTPError(400, f"temperature: {text!r:.40} is no number") from None
    return value or tuple(TEMPERATURES)


def _text(form: Mapping[str, bytes], name: str) -> str:
    return form.get(name, b"").decode("utf-8", "replace")
