"""Prompts with pictures and sounds: which rows take the places of which tokens, where they stand, what they see."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pyggml.errors import BatchError, ModelError
from pyggml.gguf_io.read import says
from pyggml.small_file import open_regular
from pyggml.types import Ints

from .batch import Batch, MediaRow, token_ids
from .loaded import LoadedModel

if TYPE_CHECKING:
    from pyggml.media import Features

# The tokens that stand for a row of a picture, and of a sound, in vocabularies of files that do not say it.
_IMAGE_TOKENS = (
    *("<image_soft_token>", "<|image_pad|>", "<|patch|>", "<|image|>", "<IMG_CONTEXT>", "[IMG]", "<image>"),
    *("<|imgpad|>", "<img>", "<|IMAGE_PAD|>", "<|media_pad|>", "<|vision_pad|>"),
)
_AUDIO_TOKENS = (
    *("<|AUDIO|>", "[AUDIO]", "<audio_soft_token>", "<|audio_pad|>", "<|audio|>", "<audio>"),
    "<|reserved_special_token_0|>",  # Ultravox's text models (Llama 3) know no sounds: a token that no text has
)
_BLOCK = 1 << 20  # bytes of a file that are read at a time
_KEPT = 16  # features that a model keeps
_BLOCKS = ("gemma3",)  # families, or else architectures, in which the rows of a picture see each other
_PREFIX = ("paligemma",)  # families in which all tokens of a prompt see each other


@dataclass(frozen=True)
class MediaPrompt:
    """A prompt with pictures or sounds, for `decode`.

    ids     token ids; of Whisper those of its decoder. In other models a placeholder stands for each row that the tower
            makes of the pictures: `media_token(model)` of the model, as often as all pictures together have rows.
            Between these there may be other tokens (of lines, of tiles), as the checkpoint's processor puts them
    images  in the order of their placeholders: a path, the bytes of a file, a PIL image, a uint8 array [height, width,
            3], or `pyggml.media.Features`, which a tower made before
    audio   the same for sounds: a path, the bytes of a file, samples, or Features
    token_types   of PaliGemma alone, one for each token: tokens of type 0 see each other, whichever comes first.
            PaliGemma was trained with 0 for all of a prompt. None: 1 for the rows of pictures, 0 for the others, which
            is what other models take as token types
    """

    ids: Sequence[int]
    images: Sequence[Any] = ()
    audio: Sequence[Any] = ()
    token_types: Sequence[int] | None = None

    def batch(self, model: LoadedModel, first: int = 0, seq: int = 0) -> Batch:
        """The batch of the prompt at position `first` of a sequence; logits of its last token are wanted. The towers
        run here. Raises BatchError when placeholders and rows do not fit together, ModelError for a model that cannot
        see or hear."""
        batch = Batch.prompt(self.ids, first, seq)
        batch.media = {i: m for i, m in enumerate(self.placed(model).rows) if m}
        return batch

    def heard(self, model: LoadedModel) -> Batch:
        """The rows of the prompt's sound, for `encode` of a model whose decoder attends to them (Whisper). Raises
        ModelError unless there is one sound and no picture, and for a model that cannot hear."""
        if self.images or len(self.audio) != 1:
            n = f"{len(self.images)} pictures and {len(self.audio)} sounds"
            raise ModelError(f"{model.arch} writes down one sound: the prompt has {n}")
        batch = Batch()
        for i, row in enumerate(features_of(model, "audio", self.audio[0]).rows):
            batch.add_embd(row, i)
        return batch

    def placed(self, model: LoadedModel) -> PlacedMedia:
        """What each token is besides its id; raises as `batch`."""
        things = {"image": self.images, "audio": self.audio}
        features = {media: [features_of(model, media, x) for x in items] for media, items in things.items()}
        rows = media_rows(model, self.ids, features, self.token_types)
        keys = [int(t) for t in self.ids]
        for media, items in things.items():
            token = media_token(model, media)
            at = (i for i, t in enumerate(self.ids) if t == token)
            for x, f in zip(items, features[media], strict=True):
                digest = media_key(x)
                for row in range(len(f.rows)):
                    keys[next(at)] = _key(digest, row)
        return PlacedMedia(rows, keys)


@dataclass(frozen=True)
class PlacedMedia:
    """Of each token of a prompt: what it is besides its id, and a number by which it is compared with those of other
    prompts: its id, or for a row of a picture one that follows from the picture's bytes, and is negative."""

    rows: Sequence[MediaRow | None]
    keys: Sequence[int]

    def behind(self, n: int) -> PlacedMedia:
        """The same for the tokens behind the first `n`."""
        return PlacedMedia(self.rows[n:], self.keys[n:])

    def whole(self, n: int) -> int:
        """The largest number of tokens up to `n` after which the prompt can be cut: no tokens that see each other are
        on both sides."""
        seen: dict[int, int] = {}  # group -> its tokens so far
        open_, best = 0, 0
        for i, row in enumerate(self.rows[:n]):
            if row is not None and row.group >= 0:
                seen[row.group] = seen.get(row.group, 0) + 1
                open_ += (seen[row.group] == 1) - (seen[row.group] == row.n_group)
            if not open_:
                best = i + 1
        return best if n <= len(self.rows) else n


def _key(digest: bytes, row: int) -> int:
    """The number of a row of the picture with this digest."""
    return -1 - (int.from_bytes(digest, "little") << 32) - row


def media_token(model: LoadedModel, media: str = "image") -> int | None:
    """The placeholder of a row of a picture, or with "audio" of a sound: as the file says, otherwise the token of the
    vocabulary with a known name (`<image>`, `<|image_pad|>`, `[IMG]` ...). None when the model has no such token."""
    said = model.kv.get(f"pyggml.media.{media}_token_id")
    if type(said) is int:
        return said
    if "tokenizer.ggml.tokens" not in model.kv:
        return None
    known = _IMAGE_TOKENS if media == "image" else _AUDIO_TOKENS
    if media == "image" and says(model.kv, "pyggml.media.family", "minicpmv", "minicpmo"):
        known = ("<unk>",)
    return next((token for token in (token_of(model, text) for text in known) if token is not None), None)


def token_of(model: LoadedModel, text: str) -> int | None:
    """The token that has this text as a whole; None when there is none."""
    ids = model.vocab.tokenize(text, False, True)
    return ids[0] if len(ids) == 1 and model.vocab.text(ids[0]) == text else None


def features_of(model: LoadedModel, media: str, thing: Any) -> Features:
    """What the model's tower makes of a picture or sound; Features stay as they are. The last ones are kept with the
    model: each turn of a chat asks for the pictures of all turns before it. Raises ModelError when the model
    has no tower."""
    from pyggml.media import Features  # who has no pictures does not wait for it

    if isinstance(thing, Features):
        return thing
    key = (media, media_key(thing))
    kept = model.features.pop(key, None)  # other threads may ask, too
    if kept is not None:
        model.features[key] = kept
        return kept
    make = getattr(model, "picture_features" if media == "image" else "sound_features", None)
    if make is None:
        what = "see: it has no tower for pictures" if media == "image" else "hear: it has no tower for sounds"
        raise ModelError(f"{model.path}: the model cannot {what}")
    found = model.features[key] = make(thing)
    if len(model.features) > _KEPT:
        model.features.popitem(last=False)
    return found


def media_rows(
    model: LoadedModel, ids: Sequence[int], features: dict[str, list[Features]], types: Sequence[int] | None = None
) -> list[MediaRow | None]:
    """For each token of a prompt what it is besides its id; None for most tokens of text. `types`: see
    `MediaPrompt.token_types`."""
    tokens = np.asarray(token_ids(ids), np.int64)
    rows: list[MediaRow | None] = [None] * len(tokens)
    for media, items in features.items():
        for i, row in _placed(model, tokens, media, items):
            rows[i] = row
    family = model.kv.get("pyggml.media.family", model.arch)
    seen = tokens == media_token(model)
    if family in _PREFIX:
        if types is not None and len(types) != len(tokens):
            raise BatchError(f"{len(types)} token types for {len(tokens)} tokens")
        free = ~seen if types is None else np.asarray(types) == 0
        group = np.where(free & bool(features.get("image")), 0, -1)
    elif family in _BLOCKS and features.get("image"):
        begins = seen & ~np.concatenate((np.zeros(1, np.bool_), seen[:-1]))
        group = np.where(seen, np.cumsum(begins) - 1, -1)
    else:
        return rows
    sizes = np.bincount(group[group >= 0], minlength=1)
    for i, g in enumerate(group.tolist()):
        if g >= 0:
            rows[i] = replace(rows[i] or MediaRow(), group=g, n_group=int(sizes[g]))
    return rows


def _placed(
    model: LoadedModel, tokens: np.ndarray[Any, np.dtype[np.int64]], media: str, items: Sequence[Features]
) -> Iterable[tuple[int, MediaRow]]:
    """The rows of pictures (or sounds), by the indices of the tokens whose places they take."""
    what = "pictures" if media == "image" else "sounds"
    token = media_token(model, media)
    if token is None:
        if items:
            raise ModelError(f"{model.path}: its vocabulary has no placeholder for the rows of {what}")
        return
    at = np.flatnonzero(tokens == token)
    n_rows = sum(len(f.rows) for f in items)
    if len(at) != n_rows:
        raise BatchError(f"{len(at)} placeholders (token {token}) for {n_rows} rows of {len(items)} {what}")
    hp, begin = model.hparams, 0
    levels = getattr(hp, "n_deepstack", 0)
    for f in items:
        n = len(f.rows)
        if f.rows.ndim != 2 or f.rows.shape[1] != hp.n_embd:
            raise BatchError(f"the rows of {what} have the shape {list(f.rows.shape)}, but n_embd is {hp.n_embd}")
        if not np.isfinite(f.rows).all():
            raise BatchError(f"the rows of {what} hold numbers that are not finite")
        if f.deepstack is not None and f.deepstack.shape != (levels, n, hp.n_embd):
            want = [levels, n, hp.n_embd]
            raise BatchError(f"deepstack has the shape {list(f.deepstack.shape)}, where the model takes {want}")
        places = at[begin : begin + n]
        begin += n
        turns = drifts = None
        if hp.n_pos_per_embd > 1 and f.grid is not None and n:
            if f.grid[0] * f.grid[1] * f.grid[2] != n or places[-1] - places[0] != n - 1:
                raise BatchError(f"a grid of {f.grid} needs as many placeholders side by side, not {n} rows")
            turns, drifts = _turns(f.grid)
        for i, place in enumerate(places.tolist()):
            turn = (0, 0, 0) if turns is None else (int(turns[0, i]), int(turns[1, i]), int(turns[2, i]))
            deep = None if f.deepstack is None else f.deepstack[:, i]
            drift = 0 if drifts is None else int(drifts[i])
            yield place, MediaRow(f.rows[i], deep, turn=turn, drift=drift)


def _turns(grid: tuple[int, int, int]) -> tuple[Ints, Ints]:
    """Of the rows of a picture (M-RoPE, arXiv:2409.12191): `turn`, int32 [3, n], and `drift`, int32 [n], see
    `MediaRow`. Rows count from the picture's beginning in time, height and width; text goes on at the largest + 1."""
    places = np.indices(grid, dtype=np.int32).reshape(3, -1)
    i = np.arange(places.shape[1], dtype=np.int32)
    after = np.maximum.accumulate(places.max(axis=0)) + 1 - (i + 1)  # of the position behind row i, from that of text
    before = np.concatenate((np.zeros(1, np.int32), after[:-1]))
    return places - i - before, after - before


def media_key(thing: Any) -> bytes:
    """A digest of a picture or sound: equal for equal bytes."""
    from hashlib import blake2b

    from pyggml.media import Features

    h = blake2b(digest_size=16)
    if isinstance(thing, str) or hasattr(thing, "__fspath__"):
        try:
            with open_regular(thing, ModelError) as file:
                found = h.copy()
                found.update(b"bytes  ")  # as below for bytes: a file has the key of its content
                while block := file.read(_BLOCK):
                    found.update(block)
                return found.digest()
        except (OSError, ModelError):  # whoever reads the picture says what is wrong with the file
            thing = repr(thing).encode()
    if isinstance(thing, Features):
        parts: list[Any] = [thing.rows, thing.grid, thing.deepstack]
    elif isinstance(thing, bytes | bytearray | memoryview):
        parts = [bytes(cast("bytes", thing))]
    elif hasattr(thing, "mode") and hasattr(thing, "tobytes"):  # a PIL image
        parts = [thing.mode, thing.size, thing.tobytes()]
    else:
        parts = [np.asarray(thing)]
    for part in parts:
        h.update(f"{type(part).__name__} {getattr(part, 'shape', '')} {getattr(part, 'dtype', '')}".encode())
        h.update(
            part.tobytes() if isinstance(part, np.ndarray) else part if isinstance(part, bytes) else repr(part).encode()
        )
    return h.digest()
