"""Messages whose contents have pictures and sounds: from the chat template's text to a prompt with placeholders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from pyggml.errors import BatchError, ModelError
from pyggml.media import Features

from ..loaded import LoadedModel
from ..media_prompt import MediaPrompt, PlacedMedia, features_of, media_token, token_of
from .templates import ChatTemplate, check_message, find_template
from .text import chat_ids

Arrays = Mapping[str, Any]
Wrap = Callable[[str, int, Arrays], str]  # (placeholder, rows, what the processor gave) -> the text for one picture


MARKER = "<__media__>"  # of llama-mtmd-cli: stands for a picture or a sound in a text
Messages = Sequence[Mapping[str, Any]]
Thing = tuple[str, Any]  # "image" or "audio", and what `MediaPrompt` takes
# What stands before and after the rows, where templates write it and processors do not.
_AROUND = {
    "image": (("<|vision_start|>", "<|vision_end|>"), ("<|begin_of_image|>", "<|end_of_image|>")),
    "audio": (("<|audio_bos|>", "<|audio_eos|>"), ("[BEGIN_AUDIO]", "")),
}


def read_messages(
    model: LoadedModel, messages: Messages, template: ChatTemplate | None = None
) -> tuple[list[int], PlacedMedia | None, tuple[str, ...]]:
    """The tokens of a chat up to where the reply begins, what it has of pictures and sounds, and the strings that end
    the reply. `template`: the model's own, when it is None.

    The content of a message is text, or a list of parts: {"type": "text", "text": ...}, {"type": "image", "image": ...}
    and {"type": "audio", "audio": ...}, with what `MediaPrompt` takes. The template puts a mark where a picture is;
    placeholders for its rows, and the family's tokens around them, take the place of the mark.

    Raises BatchError for parts that cannot be read, ModelError for a message without a role or content and for a model
    that cannot see or hear, and when the template does not put as many marks as there are pictures.
    """
    own = find_template(None, model.kv) if template is None else template
    if _are_messages(messages):
        for i, message in enumerate(messages):
            check_message(message, i)
    parted, things = split_messages(messages) if _are_messages(messages) else (messages, [])

    def render(messages: Messages) -> str:
        return own.render(messages, model.vocab)

    if not things:
        flat = [_flat(m, {}) for m in parted] if _are_messages(messages) else messages
        return chat_ids(model.vocab, render(flat)), None, own.stop
    _, ids, placed = place(model, parted, things, render, own.name)
    return ids, placed, () if _has_no_chat(model) else own.stop


def place(
    model: LoadedModel,
    parted: Messages,
    things: Sequence[Thing],
    render: Callable[[Messages], str],
    name: str,
) -> tuple[str, list[int], PlacedMedia]:
    """The text of a chat, its tokens, and what they are. `parted` and `things`: see `split_messages`. `render` makes
    the text of messages, `name` names it in errors. Raises as `read_messages`."""
    wraps = _wraps(model, things, _wrapped)
    if _has_no_chat(model):
        text = _paligemma(model, parted, wraps)
        ids = model.vocab.tokenize(text, False, True)
    else:
        marks = {media: _mark(model, media) for media, _ in things}
        text = _rendered(render, name, parted, marks, {media: len(wraps[media]) for media in marks})
        for media, mark in marks.items():
            pieces = text.split(mark)
            text = pieces[0] + "".join(w + piece for w, piece in zip(wraps[media], pieces[1:], strict=True))
        ids = chat_ids(model.vocab, text)
    return text, ids, _prompt(model, ids, things).placed(model)


def read_marked(model: LoadedModel, text: str, images: Sequence[Any] = (), audio: Sequence[Any] = ()) -> MediaPrompt:
    """The prompt of a text in which `MARKER` stands for each picture, and then for each sound. In a text without
    markers they come first. Raises BatchError for another number of markers, ModelError for a model that cannot see or
    hear."""
    return read_marks(model, text, [*(("image", x) for x in images), *(("audio", x) for x in audio)])


def read_marks(model: LoadedModel, text: str, things: Sequence[Thing]) -> MediaPrompt:
    """The same for pictures and sounds in the order of their markers."""
    n = text.count(MARKER)
    if n not in (0, len(things)):
        raise BatchError(f"the text has {n} markers {MARKER} for {len(things)} pictures and sounds")
    if _has_no_chat(model):
        parts = [{"role": "user", "content": text.replace(MARKER, "")}]
        ids = model.vocab.tokenize(_paligemma(model, parts, _wraps(model, things, _wrapped)), False, True)
        return _prompt(model, ids, things)
    wraps = _wraps(model, things, _alone)
    pieces = text.split(MARKER) if n else [*[""] * len(things), text]
    texts = {media: iter(of) for media, of in wraps.items()}
    whole = pieces[0] + "".join(next(texts[media]) + p for (media, _), p in zip(things, pieces[1:], strict=True))
    return _prompt(model, chat_ids(model.vocab, whole), things)


def _wraps(
    model: LoadedModel, things: Sequence[Thing], wrap: Callable[[LoadedModel, str, Any, str], str]
) -> dict[str, list[str]]:
    """The texts that take the places of marks."""
    wraps: dict[str, list[str]] = {"image": [], "audio": []}
    numbered = _NUMBERED.get(_family(model), "")
    for media, thing in things:
        number = numbered.format(len(wraps[media])) if media == "image" else ""
        wraps[media].append(number + wrap(model, media, thing, model.vocab.text(_token(model, media))))
    return wraps


def _prompt(model: LoadedModel, ids: Sequence[int], things: Sequence[Thing]) -> MediaPrompt:
    by_kind = {media: [x for kind, x in things if kind == media] for media in ("image", "audio")}
    return MediaPrompt(ids, by_kind["image"], by_kind["audio"], [0] * len(ids) if _is_paligemma(model) else None)


def split_messages(messages: Messages) -> tuple[list[Mapping[str, Any]], list[Thing]]:
    """Messages whose parts no longer hold the pictures and sounds, and these. Raises BatchError for parts that cannot
    be read."""
    things: list[Thing] = []
    return [_parted(m, things) for m in messages], things


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
        elif kind == "video":
            raise BatchError("a part of type 'video': video is not supported; its frames can be parts of type 'image'")
        elif kind in ("image_url", "input_audio"):
            here = "{'type': 'image', 'image': PICTURE} or {'type': 'audio', 'audio': SOUND}, a path or bytes"
            raise BatchError(f"a part of type {kind!r} is for `pyggml serve`: here it is {here}")
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
    render: Callable[[Messages], str],
    name: str,
    messages: Messages,
    marks: Mapping[str, str],
    counts: Mapping[str, int],
) -> str:
    """The chat with a mark for each picture and sound. A template that knows no parts gets one text for each message,
    with the marks in it."""
    error = ""
    for flat in (False, True):
        try:
            text = render([_flat(m, marks) for m in messages] if flat else messages)
        except (ModelError, TypeError, AttributeError) as e:  # of templates that are no Jinja, and know texts alone
            if flat:
                raise
            error = str(e)
            continue
        found = {media: text.count(mark) for media, mark in marks.items()}
        if found == counts:
            return text
        error = error or f"puts {found} marks {dict(marks)} for {dict(counts)} pictures and sounds"
    raise ModelError(f"the chat template {name:.100}: {error}")


def _token(model: LoadedModel, media: str) -> int:
    token = media_token(model, media)
    if token is None:
        raise ModelError(f"{model.path}: its vocabulary has no placeholder for {media}: the model takes none")
    return token


# -- what stands around the rows of a picture, as each family's processor writes it ------------------------------------

# The mark of a picture in a template, where it is not the placeholder itself.
_MARKS = {"gemma3": "<start_of_image>", "aya_vision": "<image>", "llama4": "<|image|>"}
# What stands before the picture with a number, from 0 on.
_NUMBERED: Mapping[str, str] = dict.fromkeys(("minicpmv4_6", "minicpmv", "minicpmo"), "<image_id>{}</image_id>")


def _family(model: LoadedModel) -> str:
    return str(model.kv.get("pyggml.media.family", model.arch))


def _has_no_chat(model: LoadedModel) -> bool:
    return _is_paligemma(model) and "tokenizer.chat_template" not in model.kv


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


def _alone(model: LoadedModel, media: str, thing: Any, token: str) -> str:
    """As `_wrapped`, with the tokens around it that a chat template would write."""
    text = _wrapped(model, media, thing, token)
    if text.replace(token, ""):
        return text
    for before, after in _AROUND[media]:
        if token_of(model, before) is not None and (not after or token_of(model, after) is not None):
            return before + text + after
    return text


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


def _llama4(token: str, n: int, arrays: Arrays) -> str:
    """The tiles by lines, then the whole picture."""
    rows, cols = (int(x) for x in np.ravel(arrays.get("aspect_ratios", (1, 1)))[:2])
    tiles = rows * cols if rows * cols > 1 else 0
    one = token * (n // (tiles + 1))
    line = "<|tile_x_separator|>".join([one] * cols) + "<|tile_y_separator|>"
    return f"<|image_start|>{line * rows if tiles else ''}<|image|>{one}<|image_end|>"


def _each(token: str, n: int, arrays: Arrays, name: str) -> list[str]:
    """The placeholders of each tile: `n` in all, by the tiles' patches, of which the array `name` has lines and
    columns."""
    patches = [int(h * w) for h, w in np.reshape(arrays.get(name, (1, n)), (-1, 2))]
    return [token * (n * p // sum(patches)) for p in patches]


def _lfm2(token: str, n: int, arrays: Arrays) -> str:
    """The tiles by lines with their places, then the whole picture."""
    tiles = _each(token, n, arrays, "spatial_shapes")
    cols = _number(arrays, "image_cols", 1)
    n_tiles = _number(arrays, "image_rows", 1) * cols
    if n_tiles == 1:
        return f"<|image_start|>{tiles[0]}<|image_end|>"
    named = [f"<|img_row_{i // cols + 1}_col_{i % cols + 1}|>{tiles[i]}" for i in range(n_tiles)]
    named += [f"<|img_thumbnail|>{t}" for t in tiles[n_tiles:]]
    return f"<|image_start|>{''.join(named)}<|image_end|>"


def _minicpm(token: str, n: int, arrays: Arrays) -> str:
    """The whole picture, then its slices by lines."""
    return _minicpm_slices(_each(token, n, arrays, "target_sizes"), arrays)


def _resampled(token: str, n: int, arrays: Arrays) -> str:
    """As `_minicpm`, where every slice has as many features."""
    n_slices = len(np.reshape(arrays.get("target_sizes", (1, n)), (-1, 2)))
    return _minicpm_slices([token * (n // n_slices)] * n_slices, arrays)


def _minicpm_slices(parts: Sequence[str], arrays: Arrays) -> str:
    whole, *slices = parts
    cols = int(np.ravel(arrays.get("grids", (0, 0)))[1])
    named = [f"<slice>{s}</slice>" for s in slices]
    lines = ["".join(named[i : i + cols]) for i in range(0, len(named), cols or 1)]
    return f"<image>{whole}</image>" + "\n".join(lines)


_WRAPS: Mapping[str, Wrap] = {
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "mistral3": _pixtral,
    "internvl": _internvl,
    "aya_vision": _aya,
    "llama4": _llama4,
    "lfm2": _lfm2,
    "lfm2_vl": _lfm2,
    "minicpmv4_6": _minicpm,
    "minicpmv": _resampled,
    "minicpmo": _resampled,
}


def _paligemma(model: LoadedModel, messages: Sequence[Mapping[str, Any]], wraps: Mapping[str, Sequence[str]]) -> str:
    """PaliGemma has no chat: the pictures, then the token that begins texts, the text, and the end of its line."""
    bos = "" if model.vocab.bos is None else model.vocab.text(model.vocab.bos)
    contents = [m.get("content") or "" for m in messages]
    texts = [c if isinstance(c, str) else "".join(part.get("text", "") for part in c) for c in contents]
    return "".join(wraps["image"]) + bos + "".join(texts) + "\n"
