"""Towers that put squares of patches into one row each ("pixel shuffle"), which the projector reads.

idefics3    Idefics3 (arXiv 2408.12637), SmolVLM: SigLIP whose positions are fractions of the picture, and one product
internvl    InternVL (arXiv 2404.16821): a ViT with layer scale; norm, two products
aya_vision  Aya Vision (arXiv 2505.08751): SigLIP; norm, two products with a gate
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pyggml import ops as gg
from pyggml.errors import ShapeError
from pyggml.media import Features
from pyggml.tensor import Tensor

from ..blocks.norm import build_norm
from ..blocks.tower import TowerBuild, TowerSize
from ..blocks.vision import (
    build_class_token,
    build_layers,
    build_merged,
    build_mlp,
    build_optional_norm,
    build_patches,
    build_vit,
    to_f32,
)
from ..hparams import Activation
from ..metadata import Reader
from .encoders import one_picture
from .hparams import VisionHParams, read_mm_act, read_vision
from .llava import encode_one
from .tower import Array, Arrays, Encoded, Tower, TowerRun, array_of


@dataclass(frozen=True, kw_only=True)
class ShuffledHParams(VisionHParams):
    """`factor`: the side of the squares, in patches. `mm_act`, `mm_eps`: activation and norm of the projector."""

    factor: int
    mm_act: Activation
    mm_eps: float


def _read(act: Activation) -> Callable[[Reader], ShuffledHParams]:
    def read(r: Reader) -> ShuffledHParams:
        key = "{arch}.projector.scale_factor"
        hp = read_vision(
            ShuffledHParams,
            r,
            act,
            factor=r.integer(key, 2),
            mm_act=read_mm_act(r),
            mm_eps=r.number("{arch}.projector.layer_norm_epsilon", 1e-5),
        )
        if not 0 < hp.factor <= hp.side or hp.side % hp.factor:
            r.fail(key, f"is {hp.factor}: squares of {hp.side} x {hp.side} patches are not made of such")
        return hp

    return read


# -- Idefics3 ---------------------------------------------------------------------------------------------------------


def parts_of(n: int, n_parts: int) -> Array:
    """For each of `n` points i / n the one of `n_parts` equal parts of [0, 1) that it falls to.

    Points often fall on the edge between two parts, and then rounding decides. So fractions and edges are rounded as in
    the transformers library, where torch.arange makes the edges: the first of each eight is rounded to float32 before
    the others are counted from it, as long as there are whole groups of sixteen.
    """
    step = 1 / n_parts
    i = np.arange(int(np.ceil((1 - step) / step)))
    edges = (step + step * i).astype(np.float32)
    first = (step + step * (i - i % 8)).astype(np.float32)
    grouped = (first.astype(np.float64) + step * (i % 8)).astype(np.float32)
    edges = np.where(i < len(i) - len(i) % 16, grouped, edges)
    points: Array = np.minimum(np.arange(n, dtype=np.float32) * np.float32(1 / n), np.float32(1 - 1e-6))
    return np.searchsorted(edges, points, side="right")


def _build_idefics3(b: TowerBuild[ShuffledHParams]) -> None:
    hp = b.hparams
    _, h, w = b.size

    def places() -> Array:
        """For each patch the learned position that its fraction of the picture falls to."""
        line, column = parts_of(h, hp.side), parts_of(w, hp.side)
        return (line[:, None] * hp.side + column).reshape(-1).astype(np.int32)

    cur = build_patches(b)
    table = b.weight("v.position_embd", (hp.n_embd, hp.side**2))
    cur = b.cb(gg.add(cur, gg.get_rows(table, b.constant("positions", places))), "pos_embd")
    cur = build_optional_norm(b, build_layers(b, cur), "v.post_ln", "layer")
    b.result("features", b.linear("mm.model.fc", build_merged(b, cur, hp.factor), hp.n_embd_out, "projection"))


def _encode_idefics3(run: TowerRun[ShuffledHParams], arrays: Arrays) -> Encoded:
    hp = run.hparams
    pixels = array_of(arrays, "pixel_values", (None, 3, None, None))
    pixels = pixels[(pixels != 0).any((1, 2, 3))]  # tiles of zeros are no tiles
    mask = arrays.get("pixel_attention_mask")
    if mask is not None and not np.all(mask):
        raise ShapeError("pixel_attention_mask: tiles that are padded are not supported")
    step = hp.patch_size * hp.factor
    if not len(pixels) or pixels.shape[2] % step or pixels.shape[3] % step:
        raise ShapeError(f"pixel_values has the shape {list(pixels.shape)}: tiles must be of squares of {step} pixels")
    size = TowerSize(len(pixels), pixels.shape[2] // hp.patch_size, pixels.shape[3] // hp.patch_size)
    rows = run(size, pixel_values=pixels)["features"]
    return Encoded(Features(rows.reshape(-1, rows.shape[2])))


# -- InternVL ---------------------------------------------------------------------------------------------------------


def _build_internvl(b: TowerBuild[ShuffledHParams]) -> None:
    hp = b.hparams
    n = b.n_patches
    cur = build_class_token(b, build_patches(b))
    if b.optional("v.position_embd", (hp.n_embd, n + 1)) is not None:
        cur = gg.add(cur, to_f32(b.weight("v.position_embd", (hp.n_embd, n + 1))))
    norm = "layer" if b.weights.ne("v.blk.0.ln1.bias") is not None else "rms"
    cur = build_optional_norm(b, build_layers(b, cur, norm=norm), "v.post_ln", "layer")
    patches = gg.cont(gg.view_3d(cur, hp.n_embd, n, cur.ne[2], cur.nb[1], cur.nb[2], cur.nb[1]))
    _projected(b, patches)


def _projected(b: TowerBuild[ShuffledHParams], cur: Tensor) -> None:
    hp = b.hparams
    cur = build_norm(b, build_merged(b, cur, hp.factor), "mm.model.mlp.0", "mm_norm", kind="layer", eps=hp.mm_eps)
    n_hidden = b.n_out("mm.model.mlp.1", (hp.n_embd_out,))
    b.result("features", build_mlp(b, cur, "mm.model.mlp.1", "mm.model.mlp.3", n_hidden, hp.mm_act))


# -- Aya Vision -------------------------------------------------------------------------------------------------------


def _build_aya(b: TowerBuild[ShuffledHParams]) -> None:
    hp = b.hparams
    cur = build_merged(b, build_vit(b), hp.factor)
    cur = build_norm(b, cur, "mm.model.mlp.0", "mm_norm", kind="layer", eps=hp.mm_eps)
    ne = b.weights.ne("mm.model.mlp.1.weight")
    both = b.linear("mm.model.mlp.1", cur, hp.n_embd_out if ne is None else ne[1], "mm_up")
    b.result("features", b.linear("mm.model.mlp.3", gg.swiglu_swapped(both), hp.n_embd_out, "mm_out"))


TOWERS = (
    Tower(("idefics3",), _read("gelu"), _build_idefics3, _encode_idefics3, one_picture),
    Tower(("internvl",), _read("gelu_erf"), _build_internvl, encode_one, one_picture),
    Tower(("aya_vision",), _read("gelu"), _build_aya, encode_one, one_picture),
)
