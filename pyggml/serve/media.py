"""Pictures and sounds in chats: from what clients send to the bytes of files."""

from __future__ import annotations

import base64
import binascii
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, unquote_to_bytes

from pyggml import limits
from pyggml.llm.generate.media_chat import MARKER, read_marks
from pyggml.llm.media_prompt import PlacedMedia, media_token

from .errors import HTTPError
from .service import Service

_SECONDS = 30  # for what a URL names
_CHUNK = 1 << 16
_fetches = threading.BoundedSemaphore(16)  # at once: there are 40 threads for all requests
_KINDS = {"image_url": "image", "input_audio": "audio"}  # OpenAI's parts -> those of `generate`
_FORMATS = ("wav", "mp3", "flac", "ogg")


def with_media(service: Service, messages: Any) -> Any:
    """Messages whose parts `image_url` and `input_audio` have become pictures and sounds as bytes. Raises HTTPError for
    those that cannot be had, and for a model that does not see or hear."""
    if not isinstance(messages, list):
        return messages
    given = cast("list[Any]", messages)
    contents: list[Any] = [m.get("content") for m in given if isinstance(m, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in cast("list[Any]", content)]
    check_media(sum(_kind(part) in _KINDS for part in parts))
    return [_message(service, m, i) for i, m in enumerate(given)]


def _kind(part: Any) -> str | None:
    kind = cast("Mapping[str, Any]", part).get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def check_media(n: int) -> None:
    """Raises HTTPError for too many pictures and sounds: a tower looks at all of them before anyone knows whether their
    rows have room, and of a picture of 70 bytes as long as of any other."""
    if n > limits.REQUEST_MEDIA:
        raise HTTPError(400, f"{n} pictures and sounds: a request has at most {limits.REQUEST_MEDIA}")


def with_marks(service: Service, given: Mapping[str, Any]) -> tuple[Sequence[int], PlacedMedia]:
    """The tokens of {"prompt_string": text, "multimodal_data": [base64]}, and what they are; the text has
    `MARKER` for each picture or sound. Raises HTTPError for data that is no base64 and another number of markers,
    ModelError for a model that does not see or hear."""
    text, data = given.get("prompt_string"), given["multimodal_data"]
    if not isinstance(text, str) or not isinstance(data, list):
        raise HTTPError(400, "a prompt is {prompt_string: text, multimodal_data: [base64 of pictures and sounds]}")
    files = [_base64(x, "multimodal_data") for x in cast("list[Any]", data)]
    things = [("audio" if _is_sound(f) else "image", f) for f in files]
    if text.count(MARKER) != len(things):
        n = text.count(MARKER)
        raise HTTPError(400, f"prompt_string has {n} markers {MARKER} for {len(things)} pictures and sounds")
    prompt = read_marks(service.model, text, things)
    return prompt.ids, prompt.placed(service.model)


def _is_sound(data: bytes) -> bool:
    """Whether a file begins as wav, flac, ogg or mp3 do."""
    mpeg = data[:1] == b"\xff" and data[1:2] >= b"\xe0"
    wav = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    return mpeg or wav or data.startswith((b"fLaC", b"OggS", b"ID3"))


def _message(service: Service, message: Any, i: int) -> Any:
    content: Any = cast("Mapping[str, Any]", message).get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return cast("Any", message)
    parts: list[Any] = []
    for part in cast("list[Any]", content):
        kind = _kind(part)
        if kind in ("image", "audio"):  # these name files of this machine
            raise HTTPError(
                400, f"messages[{i}]: a part of type {kind!r} is refused: image_url and input_audio are taken"
            )
        if kind not in _KINDS:
            parts.append(part)
            continue
        media, given = _KINDS[kind], cast("Mapping[str, Any]", part).get(kind)
        if media_token(service.model, media) is None:
            said = f"a part of type {kind!r} is refused, the model has no place for it and reads text"
            raise HTTPError(400, f"messages[{i}]: content must be text, or a list of parts of type text: {said}")
        data = _picture(service, given) if media == "image" else _sound(given)
        parts.append({"type": media, media: data})
    return {**cast("dict[str, Any]", message), "content": parts}


def _picture(service: Service, given: Any) -> bytes:
    url = cast("Mapping[str, Any]", given).get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        raise HTTPError(400, "image_url: an object with a url is wanted")
    scheme, colon, rest = url.partition(":")
    match scheme.lower() if colon else "":
        case "data":
            return _of_data(rest)
        case "http" | "https":
            if not service.options.allow_url:
                raise HTTPError(403, "image_url: this server fetches nothing (--allow-url lets it); send a data: URL")
            return _fetched(url)
        case "file":
            return _of_file(service.options.media_path, rest)
        case _:
            raise HTTPError(400, f"image_url: a URL begins with data:, http: or https:, not {url!r:.40}")


def _of_data(rest: str) -> bytes:
    """The bytes of a data: URL (RFC 2397), without `data:`."""
    head, comma, text = rest.partition(",")
    if not comma:
        raise HTTPError(400, "image_url: a data: URL has a comma before its data")
    return _base64(text, "image_url") if head.lower().endswith(";base64") else unquote_to_bytes(text)


def _base64(text: Any, what: str) -> bytes:
    try:
        if isinstance(text, str) and text:
            return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise HTTPError(400, f"{what}: the data is no base64")


def _of_file(folder: str | None, rest: str) -> bytes:
    """A file below the folder that the server shows, and nowhere else."""
    if folder is None:
        raise HTTPError(403, "image_url: this server reads no files (--media-path names a folder of them)")
    root = Path(folder).resolve()
    try:
        path = (root / unquote(rest).lstrip("/")).resolve()
        if path.is_relative_to(root) and path.is_file():
            if path.stat().st_size > limits.MEDIA_BYTES:
                raise HTTPError(413, f"image_url: the file is larger than {limits.MEDIA_BYTES} bytes")
            return path.read_bytes()
    except (OSError, ValueError):  # a name that no file has
        pass
    raise HTTPError(404, f"image_url: there is no file {rest!r:.60} in the folder of --media-path")


def _fetched(url: str) -> bytes:
    """What an http or https URL names."""
    opener = urllib.request.OpenerDirector()  # which knows no files, and no FTP
    for handler in (
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
    ):
        opener.add_handler(handler())
    end, parts, size = time.monotonic() + _SECONDS, list[bytes](), 0
    if not _fetches.acquire(blocking=False):  # each waits in a thread, and other requests need these, too
        raise HTTPError(503, "too many pictures are being fetched: try again later")
    try:
        answer = opener.open(urllib.request.Request(url, headers={"User-Agent": "pyggml"}), timeout=_SECONDS)
        if answer is None:
            raise HTTPError(400, f"image_url: {url!r:.80} leads to no http or https URL")
        with answer:
            while part := answer.read1(_CHUNK):
                parts.append(part)
                size += len(part)
                if size > limits.MEDIA_BYTES:
                    raise HTTPError(413, f"image_url: the picture is larger than {limits.MEDIA_BYTES} bytes")
                if time.monotonic() > end:
                    raise HTTPError(400, f"image_url: the picture did not come in {_SECONDS} seconds")
    except (OSError, ValueError, HTTPException) as e:
        if isinstance(e, urllib.error.HTTPError):
            e.close()
        raise HTTPError(400, f"image_url: {url!r:.80} cannot be fetched: {e}") from None
    finally:
        _fetches.release()
    return b"".join(parts)


def _sound(given: Any) -> bytes:
    if not isinstance(given, dict):
        raise HTTPError(400, "input_audio: an object with data and format is wanted")
    sound = cast("Mapping[str, Any]", given)
    if sound.get("format", "wav") not in _FORMATS:
        raise HTTPError(400, f"input_audio: the format is one of {', '.join(_FORMATS)}, not {sound['format']!r:.40}")
    return _base64(sound.get("data"), "input_audio")
