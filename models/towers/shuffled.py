"""Towers that put squares of patches into one row each ("pixel shuffle"), which the projector reads.

idefics3    Idefics3 (arXiv 2408.12637), SmolVLM: SigLIP whose positions are fractions of the picture, and one product
internvl    InternVL (arXiv 2404.16821): a ViT with layer scale; norm, two products
aya_vision  Aya Vision (arXiv 2505.08751): SigLIP; norm, two products with a gate
llama4      LLaMA 4: a ViT with a 2-D rope and the class behind the patches; three products
lfm2        LFM2-VL (arXiv 2511.23404): SigLIP 2 for tiles of any size, whose positions are made of a learned square;
            perhaps a norm, two products
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from pyggml import ops as gg
from pyggml.errors import ShapeError
from pyggml.media import Features
from pyggml.tensor import Tensor

from ..blocks.norm import build_norm
from ..blocks.tower import TowerBuild, TowerSize
from ..blocks.vision import (
    build_class_token,
    build_interpolated_positions,
    build_layers,
    build_learned_positions,
    build_merged,
    build_mlp,
    build_optional_norm,
    build_patches,
    build_rope_halves,
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
    """`factor`: the side of the squares, in patches. `mm_act`, `mm_eps`: activation and norm of the projector.
    `rope_base`: of the rope of LLaMA 4."""

    factor: int
    mm_act: Activation
    mm_eps: float
    rope_base: float


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
            rope_base=r.number("{arch}.rope.freq_base", 10000.0),
        )
        if not 0 < hp.factor <= hp.side or hp.side % hp.factor:
            r.fail(key, f"is {hp.factor}: squares of {hp.side} x {hp.side} patches are not made of such")
        return hp

    return read


# -- Idefics3 ---------------------------------------------------------------------------------------------------------


def float_range(start: float, end: float, step: float) -> Array:
    """What torch.arange makes of these numbers in float32, to the bit: the first of each eight is rounded to float32
    before the others are counted from it, as long as there are whole groups of sixteen."""
    i = np.arange(int(np.ceil((end - start) / step)))
    alone = (start + step * i).astype(np.float32)
    first = (start + step * (i - i % 8)).astype(np.float32)
    grouped = (first.astype(np.float64) + step * (i % 8)).astype(np.float32)
    return np.where(i < len(i) - len(i) % 16, grouped, alone)


def edges_of(n_parts: int) -> Array:
    """Where `n_parts` equal parts of [0, 1) touch, float32 [n_parts - 1]. Patches often fall on the edge between two
    parts, and then rounding decides, so it is that of the transformers library."""
    return float_range(1 / n_parts, 1, 1 / n_parts)


def parts_of(n: int, n_parts: int) -> Array:
    """For each of `n` points i / n the one of `n_parts` equal parts of [0, 1) that it falls to, rounded as in the
    transformers library."""
    points: Array = np.minimum(np.arange(n, dtype=np.float32) * np.float32(1 / n), np.float32(1 - 1e-6))
    return np.searchsorted(edges_of(n_parts), points, side="right")


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


# -- LLaMA 4 ----------------------------------------------------------------------------------------------------------


def _build_llama4(b: TowerBuild[ShuffledHParams]) -> None:
    hp = b.hparams
    n, h, w = b.size

    def places() -> Array:
        """Column and line of each patch from 1 on; the class is at 0, which turns nothing."""
        return np.pad(np.indices((h, w)).reshape(2, -1)[::-1] + 1, ((0, 0), (0, 1)))

    cur = build_learned_positions(b, build_class_token(b, build_patches(b), last=True))
    cur = build_norm(b, cur, "v.pre_ln", "pre_ln", kind="layer")
    cur = build_layers(b, cur, rope=build_rope_halves(b, hp.rope_base, places))
    cur = build_norm(b, cur, "v.post_ln", "post_ln", kind="layer")
    patches = gg.cont(gg.view_3d(cur, hp.n_embd, h * w, n, cur.nb[1], cur.nb[2], 0))
    cur = build_merged(b, patches, hp.factor)
    for role in ("mm.model.mlp.1", "mm.model.mlp.2"):
        ne = b.weights.ne(f"{role}.weight")
        cur = gg.gelu_erf(b.linear(role, cur, hp.n_embd_out if ne is None else ne[1], role))
    b.result("features", b.linear("mm.model.fc", cur, hp.n_embd_out, "projection"))


# -- LFM2-VL ----------------------------------------------------------------------------------------------------------


def _build_lfm2(b: TowerBuild[ShuffledHParams]) -> None:
    hp = b.hparams
    positions = build_interpolated_positions(b, hp.side, cubic=False, antialias=True)
    cur = build_layers(b, b.cb(gg.add(build_patches(b), positions), "pos_embd"))
    cur = build_merged(b, build_optional_norm(b, cur, "v.post_ln", "layer"), hp.factor)
    cur = build_optional_norm(b, cur, "mm.input_norm", "layer", hp.mm_eps)
    ne = b.weights.ne("mm.1.weight")
    b.result("features", build_mlp(b, cur, "mm.1", "mm.2", hp.n_embd_out if ne is None else ne[1], hp.mm_act))


def _encode_lfm2(run: TowerRun[ShuffledHParams], arrays: Arrays) -> Encoded:
    """The features of tiles whose patches come line by line, with the channels of a pixel side by side."""
    p = run.hparams.patch_size
    patches = array_of(arrays, "pixel_values", (None, None, 3 * p * p))
    tiles: list[Array] = []
    for tile, (h, w) in zip(patches, sizes_of_tiles(arrays, "spatial_shapes", run.hparams.factor), strict=False):
        if h * w > len(tile):
            raise ShapeError(f"spatial_shapes has {h} x {w} patches, where pixel_values has {len(tile)}")
        lines = tile[: h * w].reshape(h, w, p, p, 3)
        tiles.append(lines.transpose(4, 0, 2, 1, 3).reshape(3, h * p, w * p))
    return Encoded(Features(rows_of_tiles(run, tiles)))


def sizes_of_tiles(arrays: Arrays, name: str, factor: int) -> list[tuple[int, int]]:
    """Lines and columns of patches of each tile, as the array of that name says. Raises ShapeError unless tiles are of
    squares of `factor` x `factor` patches."""
    sizes = array_of(arrays, name, (None, 2), np.int64)
    if (sizes < 1).any() or (sizes % factor).any():
        raise ShapeError(f"{name} is {sizes.tolist()}: tiles must be of squares of {factor} x {factor} patches")
    return [(int(h), int(w)) for h, w in sizes]


def rows_of_tiles(run: TowerRun[VisionHParams], tiles: Sequence[Array]) -> Array:
    """The features of tiles of any size, float32 [3, height, width] each, one after the other: [n_rows, n_embd_out].
    Neighbours of one size run in one graph."""
    p, rows = run.hparams.patch_size, list[Array]()
    for (_, height, width), same in groupby(tiles, key=lambda t: t.shape):
        pixels = np.stack(list(same))
        found = run(TowerSize(len(pixels), height // p, width // p), pixel_values=pixels)["features"]
        rows.append(found.reshape(-1, found.shape[-1]))
    return np.concatenate(rows)


def _least_square(hp: ShuffledHParams) -> TowerSize:
    return TowerSize(1, hp.factor, hp.factor)


TOWERS = (
    Tower(("idefics3",), _read("gelu"), _build_idefics3, _encode_idefics3, one_picture),
    Tower(("internvl",), _read("gelu_erf"), _build_internvl, encode_one, one_picture),
    Tower(("aya_vision",), _read("gelu"), _build_aya, encode_one, one_picture),
    Tower(("llama4",), _read("gelu_erf"), _build_llama4, encode_one, one_picture),
    Tower(("lfm2",), _read("gelu"), _build_lfm2, _encode_lfm2, _least_square),
)
