"""Messages whose contents have pictures and sounds: from the chat template's text to a prompt with placeholders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from pyggml.errors import BatchError, ModelError
from pyggml.media import Features

from ..loaded import LoadedModel
from ..media_prompt import MediaPrompt, PlacedMedia, features_of, media_token, token_of
from .templates import ChatTemplate, find_template
from .text import chat_ids

Arrays = Mapping[str, Any]
Wrap = Callable[[str, int, Arrays], str]  # (placeholder, rows, what the processor gave) -> the text for one picture


def read_messages(
    model: LoadedModel, messages: Sequence[Mapping[str, Any]]
) -> tuple[list[int], PlacedMedia | None, tuple[str, ...]]:
    """The tokens of a chat up to where the reply begins, what it has of pictures and sounds, and the strings that end
    the reply.

    The content of a message is text, or a list of parts: {"type": "text", "text": ...}, {"type": "image", "image": ...}
    and {"type": "audio", "audio": ...}, with what `MediaPrompt` takes. The template puts a mark where a picture is;
    placeholders for its rows, and the family's tokens around them, take the place of the mark.

    Raises BatchError for parts that cannot be read, ModelError for a model that cannot see or hear, and when the
    template does not put as many marks as there are pictures.
    """
    things: list[tuple[str, Any]] = []
    parted = [_parted(m, things) for m in messages] if _are_messages(messages) else messages
    template = find_template(None, model.kv)
    if not things:
        flat = [_flat(m, {}) for m in parted] if _are_messages(messages) else messages
        return chat_ids(model.vocab, template.render(flat, model.vocab)), None, template.stop
    marks = {media: _mark(model, media) for media, _ in things}
    texts = {media: model.vocab.text(_token(model, media)) for media in marks}
    wraps: dict[str, list[str]] = {media: [] for media in marks}
    for media, thing in things:
        wraps[media].append(_wrapped(model, media, thing, texts[media]))
    if _is_paligemma(model) and "tokenizer.chat_template" not in model.kv:
        ids, stop = model.vocab.tokenize(_paligemma(model, parted, wraps), False, True), ()
    else:
        text, stop = _rendered(template, model, parted, marks, {m: len(w) for m, w in wraps.items()}), template.stop
        for media, mark in marks.items():
            pieces = text.split(mark)
            text = pieces[0] + "".join(w + piece for w, piece in zip(wraps[media], pieces[1:], strict=True))
        ids = chat_ids(model.vocab, text)
    by_kind = {media: [x for kind, x in things if kind == media] for media in ("image", "audio")}
    types = [0] * len(ids) if _is_paligemma(model) else None
    return ids, MediaPrompt(ids, by_kind["image"], by_kind["audio"], types).placed(model), stop


def _are_messages(messages: Any) -> bool:
    return isinstance(messages, Sequence) and all(isinstance(m, Mapping) for m in cast("Sequence[Any]", messages))


def _parted(message: Mapping[str, Any], things: list[tuple[str, Any]]) -> Mapping[str, Any]:
    """A message whose parts no longer hold the pictures and sounds, which are appended to `things`."""
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return message
    parts: list[Mapping[str, Any]] = []
    for given in cast("Sequence[Any]", content):
        part = cast("Mapping[str, Any]", given if isinstance(given, Mapping) else {})
        kind = part.get("type")
        if kind in ("image", "audio"):
            if kind not in part:
                raise BatchError(f"a part of type {kind!r} has no {kind!r}")
            things.append((kind, part[kind]))
            parts.append({"type": kind})
        elif kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        else:
            raise BatchError(f"a part of a message is a text, an image or an audio with its type, not {given!r:.60}")
    return {**message, "content": parts}


def _flat(message: Mapping[str, Any], marks: Mapping[str, str]) -> Mapping[str, Any]:
    """A message whose content is one text, with marks for pictures and sounds."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = cast("list[Mapping[str, str]]", content)
    return {**message, "content": "".join(p["text"] if p["type"] == "text" else f"{marks[p['type']]}\n" for p in parts)}


def _rendered(
    template: ChatTemplate,
    model: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    marks: Mapping[str, str],
    counts: Mapping[str, int],
) -> str:
    """The chat with a mark for each picture and sound. A template that knows no parts gets one text for each message,
    with the marks in it."""
    error = ""
    for flat in (False, True):
        try:
            text = template.render([_flat(m, marks) for m in messages] if flat else messages, model.vocab)
        except ModelError as e:
            if flat:
                raise
            error = str(e)
            continue
        found = {media: text.count(mark) for media, mark in marks.items()}
        if found == counts:
            return text
        error = error or f"puts {found} marks {dict(marks)} for {dict(counts)} pictures and sounds"
    raise ModelError(f"the chat template {template.name:.100}: {error}")


def _token(model: LoadedModel, media: str) -> int:
    token = media_token(model, media)
    if token is None:
        raise ModelError(f"{model.path}: its vocabulary has no placeholder for {media}: the model takes none")
    return token


# -- what stands around the rows of a picture, as each family's processor writes it ------------------------------------

_MARKS = {"gemma3": "<start_of_image>", "aya_vision": "<image>"}  # where it is not the placeholder itself


def _family(model: LoadedModel) -> str:
    return str(model.kv.get("pyggml.media.family", model.arch))


def _is_paligemma(model: LoadedModel) -> bool:
    return _family(model) == "paligemma"


def _mark(model: LoadedModel, media: str) -> str:
    own = _MARKS.get(_family(model)) if media == "image" else None
    return own or model.vocab.text(_token(model, media))


def _wrapped(model: LoadedModel, media: str, thing: Any, token: str) -> str:
    """The text for one picture or sound: a placeholder for each row, and what stands around them."""
    n = len(features_of(model, media, thing).rows)
    wrap = _WRAPS.get(_family(model)) if media == "image" else None
    if wrap is None and media == "image" and token_of(model, "[IMG_BREAK]") is not None:
        wrap = _pixtral
    if wrap is None:
        return token * n
    process = getattr(model, "process_image", None)
    arrays: Arrays = {} if isinstance(thing, Features) or process is None else process(thing)
    return wrap(token, n, arrays)


def _number(arrays: Arrays, name: str, default: int) -> int:
    return int(np.ravel(arrays[name])[0]) if name in arrays else default


def _gemma3(token: str, n: int, arrays: Arrays) -> str:
    """The whole picture, then pieces of it (pan and scan)."""
    crops = _number(arrays, "num_crops", 0)
    one = f"\n\n<start_of_image>{token * (n // (crops + 1))}<end_of_image>\n\n"
    if not crops:
        return one
    return f"Here is the original image {one} and here are some crops to help you see better {' '.join([one] * crops)}"


def _idefics3(token: str, n: int, arrays: Arrays) -> str:
    """The tiles by lines, then the whole picture."""
    around, rows, cols = "<fake_token_around_image>", _number(arrays, "rows", 0), _number(arrays, "cols", 0)
    one = token * (n // (rows * cols + 1))
    if not rows * cols:
        return f"{around}<global-img>{one}{around}"
    lines = ["".join(f"{around}<row_{r + 1}_col_{c + 1}>{one}" for c in range(cols)) for r in range(rows)]
    return "\n".join([*lines, ""]) + f"\n{around}<global-img>{one}{around}"


def _pixtral(token: str, n: int, arrays: Arrays) -> str:
    """The rows by lines of the picture, with a token at the end of each line."""
    height, width = (int(x) for x in np.ravel(arrays.get("image_sizes", (1, n)))[:2])
    cols = max(1, round((n * width / height) ** 0.5))
    return "[IMG_BREAK]".join([token * cols] * (n // cols)) + "[IMG_END]"


def _internvl(token: str, n: int, arrays: Arrays) -> str:
    return f"<img>{token * n}</img>"


def _aya(token: str, n: int, arrays: Arrays) -> str:
    """The tiles, then the whole picture."""
    tiles = _number(arrays, "num_patches", 1)
    one = token * (n // tiles)
    parts = "".join(f"TILE_{i}{one}" for i in range(1, tiles))
    return f"<|START_OF_IMG|>{parts}TILE_GLOBAL{one}<|END_OF_IMG|>"


_WRAPS: Mapping[str, Wrap] = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "mistral3": _pixtral,
    "internvl": _internvl,
    "aya_vision": _aya,
}


def _paligemma(model: LoadedModel, messages: Sequence[Mapping[str, Any]], wraps: Mapping[str, Sequence[str]]) -> str:
    """PaliGemma has no chat: the pictures, then the token that begins texts, the text, and the end of its line."""
    bos = "" if model.vocab.bos is None else model.vocab.text(model.vocab.bos)
    contents = [m.get("content") or "" for m in messages]
    texts = [c if isinstance(c, str) else "".join(part.get("text", "") for part in c) for c in contents]
    return "".join(wraps["image"]) + bos + "".join(texts) + "\n"
