"""CLIP and SigLIP read texts: embeddings, and how well texts fit to pictures."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from pyggml import limits
from pyggml.errors import ModelError
from pyggml.small_file import read_text
from pyggml.types import Floats

from .embed import Text, normalized
from .picture import embed_image
from .tower import LoadedTower

if TYPE_CHECKING:
    from .loaded import LoadedModel

_LONGEST = 64  # bytes of the longest token of a vocabulary, and more
_ENDINGS = ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d")


class Reading(NamedTuple):
    """The tower of a model that reads texts, and its vocabulary; None for a folder without a known one."""

    tower: LoadedTower
    words: ClipWords | None


def reading(model: LoadedModel) -> Reading:
    """The text encoder of a folder, loaded when it is first asked for. Raises ModelError when there is none."""
    found: Reading | None = vars(model).get("reading")
    if found is None:
        from pyggml.hf.towers import open_tower

        opened = open_tower(model.path, "text")
        if opened is None:
            raise ModelError(f"{model.path}: the model reads no texts: it has no text encoder")
        tower = LoadedTower(model.path, *opened, "text")
        tower.watches = model.watches
        clip = tower.name == "clip_text"
        found = vars(model)["reading"] = Reading(tower, ClipWords.of_folder(Path(model.path)) if clip else None)
    return found


def embed_text(
    self: LoadedModel, texts: Sequence[Text], normalize: bool | float = True, n_threads: int | None = None
) -> Floats:
    """Embeddings of texts by the text encoder of CLIP or SigLIP, float32 [n_texts, n_embd].

    texts      strings, or lists of token ids as the checkpoint's tokenizer gives them: CLIP's begin and end with its
               special tokens; SigLIP's are padded to the longest length
    normalize  see `normalized`

    Raises ModelError for a model without a text encoder, and for strings when the folder has no tokenizer that is
    known (CLIP's is); BatchError for a text that is too long, and for tokens out of range.
    """
    if isinstance(texts, str) or not isinstance(texts, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"texts must be a list of texts, not {type(texts).__name__}")
    tower = reading(self).tower
    rows: list[Any] = []
    for text in texts:
        ids = tokenize(self, text) if isinstance(text, str) else text
        rows.append(tower.encode({"input_ids": np.asarray(ids)}, n_threads).embedding)
    out = np.stack(rows) if rows else np.empty((0, tower.hparams.n_embd_out), np.float32)
    return normalized(out, normalize)


def match(self: LoadedModel, images: Iterable[Any], texts: Sequence[Text], n_threads: int | None = None) -> Floats:
    """How well texts fit to pictures, float32 [n_images, n_texts]: the cosine of their embeddings, times the scale that
    the model has learned, plus SigLIP's bias. This is the library's `logits_per_image`.

    CLIP: the softmax over the texts is the probability of each. SigLIP: the sigmoid of each number is one. Raises as
    `embed_image` and `embed`.
    """
    tower = reading(self).tower
    seen = embed_image(self, images, True, n_threads).astype(np.float64)
    scale, bias = (tower.tensor(f"t.logit_{name}") for name in ("scale", "bias"))
    read = embed_text(self, texts, True, n_threads).astype(np.float64)
    cosines: npt.NDArray[np.float64] = np.einsum("ik,jk->ij", seen, read)
    factor = 1.0 if scale is None else float(np.exp(scale.item()))
    return np.asarray(cosines * factor + (0.0 if bias is None else bias.item()), np.float32)


def tokenize(self: LoadedModel, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
    """Token ids of `text`; with `add_special`, the tokens of its begin and end. A text that is too long is cut, as the
    library's tokenizer does it. CLIP's vocabulary has no text for special tokens: `parse_special` is as without.

    Raises ModelError for a folder without CLIP's tokenizer (tokenizer.json, or vocab.json and merges.txt).
    """
    tower, words = reading(self)
    if words is None:
        raise ModelError(f"{self.path}: has no tokenizer that is known: give lists of token ids instead of texts")
    most: int = cast("Any", tower.hparams).n_pos - 2 * add_special
    ids = words.ids(text, most)
    return [words.first, *ids, words.last] if add_special else ids


class ClipWords:
    """CLIP's tokenizer: byte pairs of words in lower case; the last part of each word ends with `</w>`.

    vocab, ranks  the tokens' ids, and the order in which pairs are merged
    """

    def __init__(self, vocab: Mapping[str, int], merges: Iterable[tuple[str, ...]], where: str) -> None:
        self.vocab, self.ranks = vocab, {pair: i for i, pair in enumerate(merges)}
        try:
            self.first, self.last = vocab["<|startoftext|>"], vocab["<|endoftext|>"]
        except KeyError as e:
            raise ModelError(f"{where}: the vocabulary has no token {e}") from None
        signs = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
        rest = [b for b in range(256) if b not in signs]
        self._signs = {b: chr(b) for b in signs} | {b: chr(256 + i) for i, b in enumerate(rest)}

    @classmethod
    def of_folder(cls, folder: Path) -> ClipWords | None:
        """The tokenizer of a folder; None when it has none. Raises ModelError for a damaged one."""
        from pyggml.hf.parts import read_object

        for name in ("tokenizer.json", "vocab.json"):
            raw = read_object(folder / name)
            if not raw:
                continue
            try:
                if name == "tokenizer.json":
                    model = raw["model"]
                    merges = [tuple(m.split(" ") if isinstance(m, str) else m) for m in model["merges"]]
                    vocab = {**model["vocab"], **{t["content"]: t["id"] for t in raw.get("added_tokens", [])}}
                else:
                    lines = read_text(folder / "merges.txt", limits.JSON_BYTES, ModelError).splitlines()
                    merges, vocab = [tuple(m.split(" ")) for m in lines if m and not m.startswith("#version")], raw
                return cls(vocab, merges, str(folder / name))
            except (KeyError, TypeError, ValueError, AttributeError, OSError) as e:
                raise ModelError(f"{folder / name}: no tokenizer of CLIP ({type(e).__name__}: {e})") from None
        return None

    def ids(self, text: str, most: int) -> list[int]:
        """The first `most` token ids of a text. What the vocabulary lacks becomes the token of the end, as in the
        library. No more of a text is looked at than is needed: the time of merging is the square of a word's length."""
        found: list[int] = []
        for word in words_of(unicodedata.normalize("NFC", text).lower()):
            if len(found) >= most:
                break
            parts = [self._signs[b] for b in word.encode("utf-8")]
            parts[-1] += "</w>"
            found += [self.vocab.get(part, self.last) for part in self._merged(parts[: _LONGEST * most])]
        return found[:most]

    def _merged(self, parts: list[str]) -> list[str]:
        """Merge the pair that comes first in the order, again and again."""
        while len(parts) > 1:
            pair = min(pairwise(parts), key=lambda p: self.ranks.get(p, len(self.ranks)))
            if pair not in self.ranks:
                break
            out: list[str] = []
            for part in parts:
                if out and (out[-1], part) == pair:
                    out[-1] += part
                else:
                    out.append(part)
            parts = out
        return parts


def words_of(text: str) -> Iterator[str]:
    """The words of a text: letters side by side, single digits, other signs side by side, and the endings of English
    words with an apostrophe."""
    i = 0
    while i < len(text):
        ending = next((e for e in _ENDINGS if text.startswith(e, i)), "")
        kind = _kind(text[i])
        end = i + 1
        if ending:
            end = i + len(ending)
        elif kind in "LS":
            while end < len(text) and _kind(text[end]) == kind:
                end += 1
        if kind != " ":
            yield text[i:end]
        i = end


def _kind(c: str) -> str:
    """L: a letter, N: a number, a space, S: anything else."""
    if c.isspace():
        return " "
    major = unicodedata.category(c)[0]
    return major if major in "LN" else "S"
