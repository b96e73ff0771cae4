"""Towers of Qwen-VL and GLM-4V, for pictures of any size: patches of two frames come square by square (`merge` x
`merge` patches, which become one feature), and a 2-D rope turns Q and K.

qwen2vl_merger    Qwen2-VL (arXiv 2409.12191)
qwen2.5vl_merger  Qwen2.5-VL (arXiv 2502.13923): in most layers patches see those of their window alone
qwen3vl_merger    Qwen3-VL (arXiv 2511.21631): learned positions, made of a square of them; the states of some layers
                  are merged too, and added to the first layers of the text model (deepstack)
glm4v             GLM-4.1V (arXiv 2507.01006): learned positions as well; the squares are merged by a convolution
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
    Windows,
    build_interpolated_positions,
    build_layers,
    build_mlp,
    build_optional_norm,
    build_rope_2d,
)
from ..hparams import Activation
from ..metadata import Reader
from .hparams import VisionHParams, read_vision
from .llava import integers
from .tower import Array, Arrays, Encoded, Tower, TowerRun, array_of


@dataclass(frozen=True, kw_only=True)
class QwenVLHParams(VisionHParams):
    """Hyperparameters of Qwen-VL.

    merge      the side of a square of patches, which become one feature
    rope_base  of the rope
    window     the side of a window, in squares; 0: there are no windows
    full       the layers without windows
    deepstack  the layers whose states are merged, too
    n_ff_mm    the width of the projector's network, when it has a gate
    """

    merge: int
    rope_base: float
    window: int = 0
    full: tuple[int, ...] = ()
    deepstack: tuple[int, ...] = ()
    n_ff_mm: int = 0


def _reader(act: Activation, windows: bool = False, gated_mm: bool = False) -> Callable[[Reader], QwenVLHParams]:
    def read(r: Reader) -> QwenVLHParams:
        merge = r.integer("{arch}.spatial_merge_size", 2)
        if not 0 < merge <= 64:
            r.fail("{arch}.spatial_merge_size", f"is {merge}; 1 to 64 are supported")
        deep = r.flags("{arch}.is_deepstack_layers") if r.get("{arch}.is_deepstack_layers", None) is not None else ()
        hp = read_vision(
            QwenVLHParams,
            r,
            act,
            merge=merge,
            rope_base=r.number("{arch}.rope.freq_base", 10000.0),
            deepstack=tuple(il for il, deep in enumerate(deep) if deep),
            **(_windows(r, merge) if windows else {}),
            **(_gated_mm(r) if gated_mm else {}),
        )
        if max((*hp.deepstack, *hp.full), default=0) >= hp.n_layer:
            r.fail("{arch}.block_count", f"is {hp.n_layer}: other keys name a layer after these")
        return hp

    return read


def _gated_mm(r: Reader) -> dict[str, object]:
    """GLM-4V's sizes: the key says how wide the projector's network is. Those of the layers are as wide as a row of
    features."""
    return {"n_ff": r.integer("{arch}.projection_dim"), "n_ff_mm": r.integer("{arch}.feed_forward_length")}


def _windows(r: Reader, merge: int) -> dict[str, object]:
    pixels = r.integer("{arch}.window_size", 112)  # files of llama.cpp do not say; 112 in all models of the family
    window = pixels // merge // max(r.integer("{arch}.patch_size"), 1)
    if not window:
        r.fail("{arch}.window_size", f"is {pixels}: less than {merge} patches")
    full = integers(r, "{arch}.full_attention_layers")
    every, n_layer = r.integer("{arch}.n_wa_pattern", 0), r.integer("{arch}.block_count")
    if not full and every:
        full = tuple(range(every - 1, min(n_layer, 512), every))
    return {"window": window, "full": full}


# -- the order of patches ---------------------------------------------------------------------------------------------


def _order(h: int, w: int, merge: int, window: int) -> tuple[Array, list[tuple[int, int]]]:
    """The order in which the encoder has the squares of a picture of `h` x `w` patches, as numbers of squares line by
    line, and its windows as (number of windows, patches in each). Windows of one size follow each other. Without
    windows, the squares are in the order of the picture."""
    rows, columns = h // merge, w // merge
    grid = np.arange(rows * columns).reshape(rows, columns)
    if not window:
        return grid.reshape(-1), []
    by_size: dict[tuple[int, int], list[Array]] = {}
    for y in range(0, rows, window):
        for x in range(0, columns, window):
            part = grid[y : y + window, x : x + window]
            by_size.setdefault((part.shape[0], part.shape[1]), []).append(part.reshape(-1))
    groups = [(len(parts), size[0] * size[1] * merge**2) for size, parts in by_size.items()]
    return np.concatenate([part for parts in by_size.values() for part in parts]), groups


def _places(h: int, w: int, merge: int) -> Array:
    """Line and column of each patch, [2, n_patches], square by square."""
    line, column = np.meshgrid(np.arange(h), np.arange(w), indexing="ij")
    shape = h // merge, merge, w // merge, merge
    found: list[Array] = [a.reshape(shape).transpose(0, 2, 1, 3).reshape(-1) for a in (line, column)]
    return np.stack(found).astype(np.int32)


def _of_squares(order: Array, merge: int) -> Array:
    """The order of patches that an order of squares means."""
    return (order[:, None] * merge**2 + np.arange(merge**2)).reshape(-1)


# -- the graph --------------------------------------------------------------------------------------------------------


def _build_patch_rows(b: TowerBuild[QwenVLHParams]) -> Tensor:
    """The embeddings of patches of two frames: ne [n_embd, n_patches, 1]. `pixel_values` has the pixels of a patch by
    channel, then by frame: ne [p * p * 2 * 3, n_patches]. The file has a kernel for each frame."""
    hp = b.hparams
    p, n = hp.patch_size, b.n_patches
    kernels = [b.weight("v.patch_embd", (p, p, 3, hp.n_embd), suffix=suffix) for suffix in ("weight", "weight.1")]
    first, second = (gg.reshape_4d(kernel, p * p, 1, 3, hp.n_embd) for kernel in kernels)
    both = gg.reshape_2d(gg.concat(first, second, 1), p * p * 2 * 3, hp.n_embd)
    cur = gg.mul_mat(both, b.input("pixel_values", (p * p * 2 * 3, n)))
    bias = b.optional("v.patch_embd", (hp.n_embd,), suffix="bias")
    cur = b.cb(cur if bias is None else gg.add(cur, bias), "patch_embd")
    return gg.reshape_3d(cur, hp.n_embd, n, 1)


def _build_square_positions(b: TowerBuild[QwenVLHParams], cur: Tensor, side: int, cubic: bool, corners: bool) -> Tensor:
    """Add the learned positions of patches that come square by square."""
    _, h, w = b.size

    def places() -> Array:
        line, column = _places(h, w, b.hparams.merge)
        return line * w + column

    lines = build_interpolated_positions(b, side, cubic=cubic, corners=corners)
    return b.cb(gg.add(cur, gg.get_rows(lines, b.constant("places", places))), "pos_embd")


def _rope(b: TowerBuild[QwenVLHParams]):
    hp = b.hparams
    _, h, w = b.size
    order, _ = _order(h, w, hp.merge, hp.window)
    return build_rope_2d(b, hp.rope_base, lambda: _places(h, w, hp.merge)[:, _of_squares(order, hp.merge)])


def _merged(b: TowerBuild[QwenVLHParams], cur: Tensor) -> Tensor:
    """The patches of a square in one row: ne [n_embd * merge^2, n_squares]."""
    unit = b.hparams.merge**2
    return gg.reshape_2d(cur, cur.ne[0] * unit, b.n_patches // unit)


def _build_qwen2(b: TowerBuild[QwenVLHParams]) -> None:
    cur = build_layers(b, _build_patch_rows(b), rope=_rope(b))
    cur = _merged(b, build_norm(b, cur, "v.post_ln", "post_ln", kind="layer"))
    b.result("features", build_mlp(b, cur, "mm.0", "mm.2", cur.ne[0], "gelu_erf"))


def _build_qwen25(b: TowerBuild[QwenVLHParams]) -> None:
    hp = b.hparams
    _, h, w = b.size
    order, groups = _order(h, w, hp.merge, hp.window)

    def windows(il: int) -> Windows | None:
        return None if il in hp.full or not groups else groups

    cur = gg.reshape_2d(_build_patch_rows(b), hp.n_embd * hp.merge**2, len(order))
    cur = gg.get_rows(cur, b.constant("order", lambda: order.astype(np.int32)))
    cur = gg.reshape_3d(cur, hp.n_embd, b.n_patches, 1)
    cur = build_layers(b, cur, norm="rms", gated=True, rope=_rope(b), windows=windows)
    cur = _merged(b, build_norm(b, cur, "v.post_ln", "post_ln", kind="rms", eps=1e-6))
    cur = build_mlp(b, cur, "mm.0", "mm.2", cur.ne[0], "gelu_erf")
    b.result("features", gg.get_rows(cur, b.constant("back", lambda: np.argsort(order).astype(np.int32))))


def _build_qwen3(b: TowerBuild[QwenVLHParams]) -> None:
    hp = b.hparams
    deep: list[Tensor] = []

    def merge_too(cur: Tensor, il: int) -> None:
        if il in hp.deepstack:
            role = f"v.deepstack.{il}"
            row = build_norm(b, _merged(b, cur), f"{role}.norm", "deepstack_norm", kind="layer", eps=1e-6)
            deep.append(build_mlp(b, row, f"{role}.fc1", f"{role}.fc2", row.ne[0], "gelu_erf"))

    cur = _build_square_positions(b, _build_patch_rows(b), hp.side, cubic=False, corners=True)
    cur = build_layers(b, cur, rope=_rope(b), after=merge_too)
    cur = _merged(b, build_norm(b, cur, "v.post_ln", "post_ln", kind="layer", eps=1e-6))
    b.result("features", build_mlp(b, cur, "mm.0", "mm.2", cur.ne[0], "gelu_erf"))
    for i, t in enumerate(deep):
        b.result(f"deepstack_{i}", t)


def _build_glm4v(b: TowerBuild[QwenVLHParams]) -> None:
    hp = b.hparams
    cur = build_optional_norm(b, _build_patch_rows(b), "v.norm_embd", "rms")
    cur = _build_square_positions(b, cur, hp.side, cubic=True, corners=False)
    cur = build_layers(b, cur, norm="rms", gated=True, rope=_rope(b))
    cur = build_norm(b, cur, "v.post_ln", "post_ln", kind="rms")
    n_out = hp.n_embd_out
    kernel = b.weight("mm.patch_merger", (hp.merge, hp.merge, hp.n_embd, n_out))
    rows = gg.reshape_2d(gg.cont(gg.permute(kernel, 1, 2, 0, 3)), hp.merge**2 * hp.n_embd, n_out)
    cur = gg.mul_mat(rows, _merged(b, cur))
    bias = b.optional("mm.patch_merger", (n_out,), suffix="bias")
    cur = cur if bias is None else gg.add(cur, bias)
    cur = b.linear("mm.model.fc", cur, n_out, "mm_fc")
    cur = gg.gelu_erf(build_norm(b, cur, "mm.post_norm", "mm_post_norm", kind="layer", eps=1e-5))
    gate = gg.silu(b.linear("mm.gate", cur, hp.n_ff_mm, "mm_gate"))
    up = b.linear("mm.up", cur, hp.n_ff_mm, "mm_up")
    b.result("features", b.linear("mm.down", gg.mul(gate, up), n_out, "mm_out"))


# -- running it -------------------------------------------------------------------------------------------------------


def _encode(run: TowerRun[QwenVLHParams], arrays: Arrays) -> Encoded:
    hp = run.hparams
    t, h, w = (int(n) for n in array_of(arrays, "image_grid_thw", (3,), np.int64))
    if t != 1 or h < 1 or w < 1 or h % hp.merge or w % hp.merge:
        raise ShapeError(f"image_grid_thw is {t}, {h}, {w}: one frame of squares of {hp.merge} x {hp.merge} is read")
    p = hp.patch_size
    got = run(TowerSize(1, h, w), pixel_values=array_of(arrays, "pixel_values", (h * w, 3 * 2 * p * p)))
    deep = np.stack([got[f"deepstack_{i}"] for i in range(len(hp.deepstack))]) if hp.deepstack else None
    return Encoded(Features(got["features"], (t, h // hp.merge, w // hp.merge), deep))


def _least(hp: QwenVLHParams) -> TowerSize:
    return TowerSize(1, hp.merge, hp.merge)


TOWERS = (
    Tower(("qwen2vl_merger",), _reader("gelu_quick"), _build_qwen2, _encode, _least),
    Tower(("qwen2.5vl_merger",), _reader("silu", windows=True), _build_qwen25, _encode, _least),
    Tower(("qwen3vl_merger",), _reader("gelu"), _build_qwen3, _encode, _least),
    Tower(("glm4v",), _reader("silu", gated_mm=True), _build_glm4v, _encode, _least),
)
