"""Text encoders beside those of pictures: texts and pictures that belong together have similar embeddings.

clip_text    CLIP (arXiv 2103.00020): each token sees those before it; the state of the text's end is projected
siglip_text  SigLIP (arXiv 2303.15343): all tokens see each other; the state of the last one is projected
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.errors import BatchError
from pyggml.gguf_io.keys import Keys
from pyggml.media import Features

from ..blocks.norm import build_norm
from ..blocks.tower import TowerBuild, TowerSize
from ..blocks.vision import build_layers, to_f32
from ..metadata import Reader
from .hparams import TowerHParams, read_tower
from .tower import Array, Arrays, Encoded, Tower, TowerRun, array_of

_MAX_POSITIONS = 1 << 16
_FIRST_CLIP_END = 2  # what the configs of the first CLIP checkpoints say is the end; it is the largest token instead


@dataclass(frozen=True, kw_only=True)
class TextHParams(TowerHParams):
    """n_vocab  tokens of the vocabulary
    n_pos    tokens of the longest text
    end      the token at the end of CLIP's texts"""

    n_vocab: int
    n_pos: int
    end: int


def _read(r: Reader) -> TextHParams:
    n_pos, n_vocab = r.integer(Keys.LLM.CONTEXT_LENGTH), r.integer(Keys.LLM.VOCAB_SIZE)
    if not 0 < n_pos <= _MAX_POSITIONS:
        r.fail(Keys.LLM.CONTEXT_LENGTH, f"is {n_pos}: 1 to {_MAX_POSITIONS} are supported")
    if not n_vocab:
        r.fail(Keys.LLM.VOCAB_SIZE, "is 0")
    return read_tower(TextHParams, r, "gelu", n_vocab=n_vocab, n_pos=n_pos, end=r.integer("{arch}.eos_token_id", 0))


def _builder(causal: bool) -> Callable[[TowerBuild[TextHParams]], None]:
    def build(b: TowerBuild[TextHParams]) -> None:
        hp, n = b.hparams, b.size.w
        cur = gg.get_rows(b.weight("t.token_embd", (hp.n_embd, hp.n_vocab)), b.input("ids", (n,), DType.I32))
        positions = to_f32(b.weight("t.position_embd", (hp.n_embd, hp.n_pos)))
        cur = gg.add(cur, gg.view_2d(positions, hp.n_embd, n, positions.nb[1], 0))
        cur = build_layers(b, gg.reshape_3d(b.cb(cur, "pos_embd"), hp.n_embd, n, 1), causal=causal)
        last = gg.get_rows(gg.reshape_2d(cur, hp.n_embd, n), b.input("last", (1,), DType.I32))
        last = build_norm(b, last, "t.post_ln", "post_ln", kind="layer")
        b.result("embedding", b.linear("t.projection", last, hp.n_embd_out, "projection"))
        for name in ("t.logit_scale", "t.logit_bias"):
            b.optional(name, (1,), suffix="")

    return build


def _checked(run: TowerRun[TextHParams], arrays: Arrays) -> Array:
    hp, ids = run.hparams, array_of(arrays, "input_ids", (None,), np.int32)
    if len(ids) > hp.n_pos:
        raise BatchError(f"a text has {len(ids)} tokens; the encoder reads 1 to {hp.n_pos}")
    if ids.min() < 0 or ids.max() >= hp.n_vocab:
        raise BatchError(f"a text has the token {ids.max()}; the encoder knows 0 to {hp.n_vocab - 1}")
    return ids


def _encode_to_end(run: TowerRun[TextHParams], arrays: Arrays) -> Encoded:
    """The tokens behind the end are not seen by those before it, so all texts can have the same length."""
    hp, ids = run.hparams, _checked(run, arrays)
    last = int((ids if hp.end == _FIRST_CLIP_END else ids == hp.end).argmax())
    padded = np.zeros(hp.n_pos, np.int32)
    padded[: last + 1] = ids[: last + 1]
    return _encoded(run, padded, last)


def _encode_all(run: TowerRun[TextHParams], arrays: Arrays) -> Encoded:
    ids = _checked(run, arrays)
    return _encoded(run, ids, len(ids) - 1)


def _encoded(run: TowerRun[TextHParams], ids: Array, last: int) -> Encoded:
    got = run(TowerSize(1, 1, len(ids)), ids=ids, last=np.array([last], np.int32))["embedding"]
    return Encoded(Features(got), got.reshape(-1))


def _least(hp: TextHParams) -> TowerSize:
    return TowerSize(1, 1, 1)


TOWERS = (
    Tower(("clip_text",), _read, _builder(True), _encode_to_end, _least, "t"),
    Tower(("siglip_text",), _read, _builder(False), _encode_all, _least, "t"),
)
