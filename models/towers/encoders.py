"""Encoders of pictures for search and classification. Their features are the last hidden states; the embedding is one
vector for a whole picture.

Checkpoints for classification have scores for their classes, too: of the class token (ViT), of the mean of the patches
(CLIP, SigLIP), or of both side by side (DINOv2).

clip    CLIP (arXiv 2103.00020): a class token, whose normed state is projected
siglip  SigLIP (arXiv 2303.15343): a learned query attends to the patches
dinov2  DINOv2 (arXiv 2304.07193): layer scale, and positions made of those of another size; the class token's state
vit     ViT (arXiv 2010.11929): tanh of a product of the class token's state
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.errors import ShapeError
from pyggml.media import Features
from pyggml.tensor import Tensor

from ..blocks.ffn import ACTIVATIONS
from ..blocks.norm import build_norm
from ..blocks.tower import TowerBuild, TowerSize
from ..blocks.vision import (
    build_attention_pool,
    build_class_token,
    build_first_token,
    build_interpolated_positions,
    build_layers,
    build_mean,
    build_patches,
    build_vit,
    to_f32,
)
from ..hparams import Activation
from ..metadata import Reader
from .hparams import VisionHParams, read_mm_act, read_vision
from .tower import Array, Arrays, Encoded, Tower, TowerRun, array_of, squares_of


@dataclass(frozen=True, kw_only=True)
class ViTHParams(VisionHParams):
    """`pool_act`: the activation of the pooler."""

    pool_act: Activation


def _read(r: Reader) -> VisionHParams:
    return read_vision(VisionHParams, r)


def _read_vit(r: Reader) -> ViTHParams:
    return read_vision(ViTHParams, r, pool_act=read_mm_act(r, "tanh"))


def _build_scores(b: TowerBuild[VisionHParams], read: Callable[[], Tensor]) -> None:
    """The scores of classes, when the tower has a classifier. `read`: what the classifier reads."""
    ne = b.weights.ne("v.classifier.weight")
    if ne is not None:
        b.result("scores", b.linear("v.classifier", read(), ne[1], "scores"))


def _build_clip(b: TowerBuild[VisionHParams]) -> None:
    cur = b.result("features", build_vit(b, class_token=True, post_norm=False))
    pooled = build_norm(b, build_first_token(b, cur), "v.post_ln", "post_ln", kind="layer")
    if b.optional("v.projection", (b.hparams.n_embd, b.hparams.n_embd_out)) is not None:
        pooled = b.linear("v.projection", pooled, b.hparams.n_embd_out, "projection")
    b.result("embedding", pooled)
    _build_scores(b, lambda: build_mean(b, cur, first=1))


def _build_siglip(b: TowerBuild[VisionHParams]) -> None:
    cur = b.result("features", build_vit(b))
    if b.optional("v.head.probe", (b.hparams.n_embd,), suffix="") is not None:
        b.result("embedding", build_attention_pool(b, cur))
    _build_scores(b, lambda: build_mean(b, cur))


def _build_dinov2(b: TowerBuild[VisionHParams]) -> None:
    hp = b.hparams
    cur = build_class_token(b, build_patches(b))
    table = b.weight("v.position_embd", (hp.n_embd, 1 + hp.side**2))
    first = gg.view_2d(to_f32(table), hp.n_embd, 1, table.nb[1], 0)
    positions = gg.concat(first, build_interpolated_positions(b, hp.side, first=1), 1)
    cur = b.cb(gg.add(cur, positions), "pos_embd")
    gated = b.weights.ne("v.blk.0.ffn_gate.weight") is not None
    cur = build_layers(b, cur, gated=gated)
    cur = b.result("features", build_norm(b, cur, "v.post_ln", "post_ln", kind="layer"))
    token = b.result("embedding", build_first_token(b, cur))
    _build_scores(b, lambda: gg.concat(token, build_mean(b, cur, first=1), 0))


def _build_vit(b: TowerBuild[ViTHParams]) -> None:
    hp = b.hparams
    cur = b.result("features", build_vit(b, class_token=True))
    token = pooled = build_first_token(b, cur)
    n_out = b.n_out("v.head.pooler", (hp.n_embd_out,))
    if b.optional("v.head.pooler", (hp.n_embd, n_out)) is not None:
        pooled = ACTIVATIONS[hp.pool_act](b.linear("v.head.pooler", pooled, n_out, "pooler"))
    b.result("embedding", pooled)
    _build_scores(b, lambda: token)


def _encoded(got: Mapping[str, Array]) -> Encoded:
    embedding, scores = (got[name][0] if name in got else None for name in ("embedding", "scores"))
    return Encoded(Features(got["features"][0]), embedding, scores)


def _encode_any_size(run: TowerRun[VisionHParams], arrays: Arrays) -> Encoded:
    pixels = array_of(arrays, "pixel_values", (1, 3, None, None))
    p = run.hparams.patch_size
    h, w = (n // p for n in pixels.shape[2:])
    if not h or not w:
        raise ShapeError(f"pixel_values has the shape {list(pixels.shape)}: less than a patch of {p} x {p}")
    got = run(TowerSize(1, h, w), pixel_values=pixels[:, :, : h * p, : w * p])
    return _encoded(got)


def _encode(run: TowerRun[VisionHParams], arrays: Arrays) -> Encoded:
    hp = run.hparams
    got = run(TowerSize(1, hp.side, hp.side), pixel_values=squares_of(arrays, hp, 1))
    return _encoded(got)


def one_picture(hp: VisionHParams) -> TowerSize:
    """The size of one picture as in training."""
    return TowerSize(1, hp.side, hp.side)


TOWERS = (
    Tower(("clip",), _read, _build_clip, _encode, one_picture),
    Tower(("siglip",), _read, _build_siglip, _encode, one_picture),
    Tower(("dinov2",), _read, _build_dinov2, _encode_any_size, one_picture),
    Tower(("vit",), _read_vit, _build_vit, _encode, one_picture),
)
