"""LLaVA and its kin: a CLIP, SigLIP or other encoder of pictures of one size, whose last states a network of two
products makes rows of the text of.

mlp        LLaVA (arXiv 2304.08485), LLaVA-NeXT and LLaVA-OneVision (arXiv 2408.03326): the features of some layer. The
           last two look at a large picture as a whole and in tiles; after each line of the tiles' patches comes a
           learned row (`v.image_newline`)
paligemma  PaliGemma (arXiv 2407.07726): SigLIP and one product
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from pyggml import ops as gg
from pyggml.errors import ShapeError
from pyggml.media import Features
from pyggml.media.sizes import best_canvas
from pyggml.tensor import Tensor

from ..blocks.norm import build_norm
from ..blocks.tower import TowerBuild, TowerSize
from ..blocks.vision import (
    axis_weights,
    build_class_token,
    build_layers,
    build_learned_positions,
    build_mlp,
    build_optional_norm,
    build_patches,
    build_vit,
)
from ..hparams import Activation
from ..metadata import Reader
from .encoders import one_picture
from .hparams import VisionHParams, read_mm_act, read_vision
from .tower import Array, Arrays, Encoded, Tower, TowerRun, array_of, squares_of


@dataclass(frozen=True, kw_only=True)
class LlavaHParams(VisionHParams):
    """Hyperparameters of LLaVA.

    mm_act     the activation of the projector
    layers     the layers whose results are the features, side by side; empty: the last one's
    drops      the first token is no feature; None: when it is that of the class
    pinpoints  sizes in pixels, (height, width), of which a picture gets the one that fits best; empty: no tiles
    most       a picture whose tiles have more patches than this many tiles (and a fifth) gets fewer features; 0: never
    """

    mm_act: Activation
    layers: tuple[int, ...]
    drops: bool | None
    pinpoints: tuple[tuple[int, int], ...]
    most: int


def integers(r: Reader, key: str) -> tuple[int, ...]:
    """A list of numbers that a file may lack."""
    value = r.get(key, None)
    if value is None:
        return ()
    if isinstance(value, np.ndarray):
        value = cast("list[object]", value.tolist())
    if not isinstance(value, list) or not all(type(v) is int for v in cast("list[object]", value)):
        r.fail(key, f"must be a list of integers, not {value!r:.60}")
    return tuple(cast("list[int]", value))


def _read(r: Reader) -> LlavaHParams:
    flat = integers(r, "{arch}.image_grid_pinpoints")
    key = "{arch}.feature_drops_first"
    act: Activation = "gelu" if r.kv.get("clip.use_gelu") is True else "gelu_quick"
    return read_vision(
        LlavaHParams,
        r,
        "silu" if r.kv.get("clip.use_silu") is True else act,
        mm_act=read_mm_act(r),
        layers=tuple(il for il in integers(r, "{arch}.feature_layer")),
        drops=r.boolean(key) if r.get(key, None) is not None else None,
        pinpoints=tuple(zip(flat[::2], flat[1::2], strict=False)),
        most=r.integer("{arch}.anyres_max", 0),
    )


def _build(b: TowerBuild[LlavaHParams]) -> None:
    hp = b.hparams
    cur = build_patches(b)
    has_class = b.weights.ne("v.class_embd") is not None
    if has_class:
        cur = build_class_token(b, cur)
    cur = build_optional_norm(b, build_learned_positions(b, cur), "v.pre_ln", "layer")
    kept: dict[int, Tensor] = {0: cur}  # by how many layers came before

    def keep(cur: Tensor, il: int) -> None:
        kept[il + 1] = cur

    cur = build_layers(b, cur, after=keep)
    if hp.layers:
        cur = kept[hp.layers[0]]
        for layer in hp.layers[1:]:
            cur = gg.concat(cur, kept[layer], 0)
    else:
        cur = build_optional_norm(b, cur, "v.post_ln", "layer")
    if has_class if hp.drops is None else hp.drops:
        cur = gg.cont(gg.view_3d(cur, cur.ne[0], cur.ne[1] - 1, cur.ne[2], cur.nb[1], cur.nb[2], cur.nb[1]))
    b.optional("v.image_newline", (hp.n_embd_out,), suffix="")
    n_hidden = b.n_out("mm.0", (hp.n_embd_out,))
    b.result("features", build_mlp(b, cur, "mm.0", "mm.2", n_hidden, hp.mm_act))


def _encode(run: TowerRun[LlavaHParams], arrays: Arrays) -> Encoded:
    hp = run.hparams
    pixels = squares_of(arrays, hp)
    newline = run.tensor("v.image_newline")
    if newline is None:
        if len(pixels) != 1:
            raise ShapeError(f"pixel_values has {len(pixels)} pictures: the tower has no v.image_newline for tiles")
        return Encoded(Features(run(TowerSize(1, hp.side, hp.side), pixel_values=pixels)["features"][0]))
    height, width = (int(v) for v in array_of(arrays, "image_sizes", (2,), np.int64))
    tiles_h, tiles_w = 0, 0
    if len(pixels) > 1:
        tiles_h, tiles_w = (n // hp.image_size for n in best_size(height, width, hp.pinpoints))
        if len(pixels) < 1 + tiles_h * tiles_w:
            raise ShapeError(
                f"pixel_values has {len(pixels)} tiles; a picture of {height} x {width} has {1 + tiles_h * tiles_w}"
            )
        pixels = pixels[: 1 + tiles_h * tiles_w]
    rows = run(TowerSize(len(pixels), hp.side, hp.side), pixel_values=pixels)["features"]
    if len(rows) == 1:
        return Encoded(Features(np.concatenate([rows[0], newline[None]])))
    side, n_embd = hp.side, rows.shape[2]
    if rows.shape[1] != side * side:
        raise ShapeError(f"tiles of {rows.shape[1]} features make no square of {side} x {side} patches")
    tiles: Any = rows[1:].reshape(tiles_h, tiles_w, side, side, n_embd)
    across: Any = tiles.transpose(0, 2, 1, 3, 4)
    grid = unpadded(across.reshape(tiles_h * side, tiles_w * side, n_embd), height, width)
    if hp.most:
        grid = _at_most(grid, hp.most * side * side)
    lines = np.concatenate([grid, np.broadcast_to(newline, (len(grid), 1, n_embd))], 1)
    return Encoded(Features(np.concatenate([rows[0], lines.reshape(-1, n_embd)])))


def best_size(height: int, width: int, sizes: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The size that shows most of a picture's pixels, and of those that show equally many the smallest one. Raises
    ShapeError for a picture without pixels, and when there are no sizes."""
    if height < 1 or width < 1:
        raise ShapeError(f"image_sizes is {height}, {width}: no picture")
    best = best_canvas((height, width), sizes)
    if best == (0, 0):
        raise ShapeError("image_grid_pinpoints has no sizes")
    return best


def unpadded(grid: Array, height: int, width: int) -> Array:
    """The lines or columns of `grid` that show a picture of height x width, which was made to fit by padding."""
    h, w = grid.shape[:2]
    if width / height > w / h:
        pad = (h - int(round(height * (w / width), 7))) // 2
        return grid[pad : h - pad]
    pad = (w - int(round(width * (h / height), 7))) // 2
    return grid[:, pad : w - pad]


def _at_most(grid: Array, n: int) -> Array:
    """A grid of more than n * 1.21 features, made fewer by interpolation between them."""
    h, w, _ = grid.shape
    ratio = np.sqrt(h * w / n)
    if ratio <= 1.1:
        return grid
    of_h = axis_weights(int(h // ratio), h, cubic=False, corners=False)
    of_w = axis_weights(int(w // ratio), w, cubic=False, corners=False)
    fewer: Array = np.einsum("ih,jw,hwc->ijc", of_h, of_w, grid, optimize=True)  # pyright: ignore[reportUnknownMemberType]
    return fewer.astype(np.float32)


def _read_paligemma(r: Reader) -> VisionHParams:
    return read_vision(VisionHParams, r)


def _build_paligemma(b: TowerBuild[VisionHParams]) -> None:
    b.result("features", b.linear("mm.model.fc", build_vit(b), b.hparams.n_embd_out, "projection"))


def encode_one(run: TowerRun[VisionHParams], arrays: Arrays) -> Encoded:
    """The features of one picture of the size of training (or of several tiles, one after the other)."""
    hp = run.hparams
    pixels = squares_of(arrays, hp)
    rows = run(TowerSize(len(pixels), hp.side, hp.side), pixel_values=pixels)["features"]
    return Encoded(Features(rows.reshape(-1, rows.shape[2])))


@dataclass(frozen=True, kw_only=True)
class Gemma3HParams(VisionHParams):
    """`factor`: the side, in patches, of the squares whose mean is a feature."""

    factor: int


def _read_gemma3(r: Reader) -> Gemma3HParams:
    return read_vision(Gemma3HParams, r, factor=r.integer("{arch}.projector.scale_factor", 4))


def _build_gemma3(b: TowerBuild[Gemma3HParams]) -> None:
    """Gemma 3 (arXiv 2503.19786): SigLIP, the mean of each square of patches, a norm and one product."""
    hp = b.hparams
    n, h, w = b.size
    cur = gg.cont(gg.permute(build_vit(b), 1, 0, 2, 3))
    planes = gg.reshape_4d(cur, w, h, hp.n_embd, n)
    pooled = gg.pool_2d(planes, "avg", hp.factor, hp.factor, hp.factor, hp.factor, 0.0, 0.0)
    pooled = gg.reshape_3d(pooled, pooled.ne[0] * pooled.ne[1], hp.n_embd, n)
    cur = build_norm(b, gg.cont(gg.permute(pooled, 1, 0, 2, 3)), "mm.soft_emb_norm", "soft_emb_norm", kind="rms")
    weight = b.weight("mm.input_projection", (hp.n_embd_out, hp.n_embd))
    b.result("features", gg.mul_mat(gg.cont(gg.transpose(weight)), cur))


TOWERS = (
    Tower(("mlp",), _read, _build, _encode, one_picture),
    Tower(("paligemma",), _read_paligemma, _build_paligemma, encode_one, one_picture),
    Tower(("gemma3",), _read_gemma3, _build_gemma3, encode_one, one_picture),
)
