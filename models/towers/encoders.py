"""Encoders of pictures for search and classification. Their features are the last hidden states; the embedding is one
vector for a whole picture.

clip    CLIP (arXiv 2103.00020): a class token, whose normed state is projected
siglip  SigLIP (arXiv 2303.15343): a learned query attends to the patches
"""

from __future__ import annotations

from pyggml.media import Features

from ..blocks.norm import build_norm
from ..blocks.tower import TowerBuild, TowerSize
from ..blocks.vision import build_attention_pool, build_first_token, build_vit
from ..metadata import Reader
from .hparams import VisionHParams, read_vision
from .tower import Arrays, Encoded, Tower, TowerRun, array_of


def _read(r: Reader) -> VisionHParams:
    return read_vision(VisionHParams, r)


def _build_clip(b: TowerBuild[VisionHParams]) -> None:
    cur = b.result("features", build_vit(b, class_token=True, post_norm=False))
    pooled = build_norm(b, build_first_token(b, cur), "v.post_ln", "post_ln", kind="layer")
    if b.optional("v.projection", (b.hparams.n_embd, b.hparams.n_embd_out)) is not None:
        pooled = b.linear("v.projection", pooled, b.hparams.n_embd_out, "projection")
    b.result("embedding", pooled)


def _build_siglip(b: TowerBuild[VisionHParams]) -> None:
    cur = b.result("features", build_vit(b))
    b.result("embedding", build_attention_pool(b, cur))


def _encode(run: TowerRun[VisionHParams], arrays: Arrays) -> Encoded:
    hp = run.hparams
    pixels = array_of(arrays, "pixel_values", (1, 3, hp.image_size, hp.image_size))
    got = run(TowerSize(1, hp.side, hp.side), pixel_values=pixels)
    return Encoded(Features(got["features"][0]), got["embedding"][0])


def one_picture(hp: VisionHParams) -> TowerSize:
    """The size of one picture as in training."""
    return TowerSize(1, hp.side, hp.side)


TOWERS = (
    Tower(("clip",), _read, _build_clip, _encode, one_picture),
    Tower(("siglip",), _read, _build_siglip, _encode, one_picture),
)
