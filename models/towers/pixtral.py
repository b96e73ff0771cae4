"""Pixtral (arXiv 2410.07073) and Mistral Small 3.1: pictures of any size, with a 2-D rope and no class token. Mistral
Small puts squares of patches into one row each (`mm.patch_merger`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggml.errors import ShapeError
from pyggml.media import Features

from ..blocks.norm import build_norm
from ..blocks.tower import TowerBuild, TowerSize
from ..blocks.vision import (
    build_channels_merged,
    build_layers,
    build_mlp,
    build_optional_norm,
    build_patches,
    build_rope_halves,
)
from ..hparams import Activation
from ..metadata import Reader
from .hparams import VisionHParams, read_mm_act, read_vision
from .tower import Arrays, Encoded, Tower, TowerRun, array_of


@dataclass(frozen=True, kw_only=True)
class PixtralHParams(VisionHParams):
    """`merge`: the side of the squares, in patches; 1: there are none. `rope_base`: of the rope. `mm_act`, `mm_eps`:
    activation and norm of the projector."""

    merge: int
    rope_base: float
    mm_act: Activation
    mm_eps: float


def _read(r: Reader) -> PixtralHParams:
    merge = r.integer("{arch}.spatial_merge_size", 1)
    if not 0 < merge <= 64:
        r.fail("{arch}.spatial_merge_size", f"is {merge}; 1 to 64 are supported")
    return read_vision(
        PixtralHParams,
        r,
        "silu" if r.kv.get("clip.use_silu") is True else "gelu_erf",
        merge=merge,
        rope_base=r.number("{arch}.rope.freq_base", 10000.0),
        mm_act=read_mm_act(r),
        mm_eps=r.number("{arch}.projector.layer_norm_epsilon", 1e-5),
    )


def _build(b: TowerBuild[PixtralHParams]) -> None:
    hp = b.hparams
    cur = build_norm(b, build_patches(b), "v.pre_ln", "pre_ln", kind="rms")
    _, h, w = b.size
    # The pairs of a head are ever slower in turns: the first of lines, the first of columns, the second of lines ...
    scales = (1.0, hp.rope_base ** (-2 * hp.n_head / hp.n_embd))
    rope = build_rope_halves(b, hp.rope_base, lambda: np.indices((h, w)).reshape(2, -1), scales)
    cur = build_layers(b, cur, norm="rms", gated=True, rope=rope)
    cur = build_optional_norm(b, cur, "mm.input_norm", "rms", hp.mm_eps)
    if hp.merge > 1:
        kernel = b.weight("mm.patch_merger", (hp.n_embd * hp.merge**2, hp.n_embd))
        cur = b.cb(build_channels_merged(b, cur, kernel, hp.merge), "patch_merger")
    b.optional("v.token_embd.img_break", (hp.n_embd_out,), suffix="")  # the text has it, too
    b.result("features", build_mlp(b, cur, "mm.1", "mm.2", b.n_out("mm.1", (hp.n_embd_out,)), hp.mm_act))


def _encode(run: TowerRun[PixtralHParams], arrays: Arrays) -> Encoded:
    hp = run.hparams
    pixels = array_of(arrays, "pixel_values", (1, 3, None, None))
    said = "image_sizes" in arrays
    height, width = (int(n) for n in (array_of(arrays, "image_sizes", (2,), np.int64) if said else pixels.shape[2:]))
    step = hp.patch_size * hp.merge
    if not step <= height <= pixels.shape[2] or not step <= width <= pixels.shape[3]:
        raise ShapeError(
            f"pixel_values has the shape {list(pixels.shape)}, image_sizes {height} x {width}: not of {step}"
        )
    h, w = height // hp.patch_size, width // hp.patch_size
    pixels = pixels[:, :, : h * hp.patch_size, : w * hp.patch_size]
    return Encoded(Features(run(TowerSize(1, h, w), pixel_values=pixels)["features"][0]))


def _least(hp: PixtralHParams) -> TowerSize:
    return TowerSize(1, hp.merge, hp.merge)


TOWERS = (Tower(("pixtral",), _read, _build, _encode, _least),)
