"""MiniCPM-V 4.6: SigLIP for slices of any size, whose positions are fractions of the slice. Squares of 2 x 2 patches
become one, first between two layers and again at the end.

At the first merger the patches of a square see each other; a network makes one row of their four, to which their mean
is added. Towers for text in small print leave it out ("4x", `factor` 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggml import ops as gg
from pyggml.errors import ShapeError
from pyggml.media import Features
from pyggml.tensor import Tensor

from ..blocks.norm import build_norm
from ..blocks.tower import TowerBuild, TowerSize
from ..blocks.vision import build_layers, build_merged, build_mlp, build_patches, build_self_attn
from ..metadata import Reader
from .hparams import VisionHParams, read_vision
from .llava import integers
from .shuffled import edges_of, rows_of_tiles, sizes_of_tiles
from .tower import Array, Arrays, Encoded, Tower, TowerRun, array_of


@dataclass(frozen=True, kw_only=True)
class MiniCPMVHParams(VisionHParams):
    """`factor`: the side, in patches, of the squares that become a feature. `merges_after`: the layer after which the
    first merger comes, when `factor` is 4."""

    factor: int
    merges_after: int


def _read(r: Reader) -> MiniCPMVHParams:
    factor = r.integer("{arch}.projector.scale_factor", 4)
    if factor not in (2, 4):
        r.fail("{arch}.projector.scale_factor", f"is {factor}: only 2 and 4 are supported")
    after = (integers(r, "{arch}.wa_layer_indexes") or (6,))[0]
    hp = read_vision(MiniCPMVHParams, r, factor=factor, merges_after=after)
    if factor == 4 and not 0 <= after < hp.n_layer:
        r.fail("{arch}.wa_layer_indexes", f"is {after}: there are {hp.n_layer} layers")
    return hp


def _build(b: TowerBuild[MiniCPMVHParams]) -> None:
    hp = b.hparams
    _, h, w = b.size

    def places() -> Array:
        """For each patch the learned position that its fraction of the slice falls to."""
        edges = edges_of(hp.side)
        points = (np.arange(n, dtype=np.float32) / np.float32(n) for n in (h, w))
        line, column = (np.searchsorted(edges, p, side="right") for p in points)
        return (line[:, None] * hp.side + column).reshape(-1).astype(np.int32)

    table = b.weight("v.position_embd", (hp.n_embd, hp.side**2))
    cur = b.cb(gg.add(build_patches(b), gg.get_rows(table, b.constant("positions", places))), "pos_embd")
    grid, done = (h, w), 0
    if hp.factor == 4:
        done = hp.merges_after + 1
        cur = _build_merger(b, build_layers(b, cur, layers=range(done)))
        grid = h // 2, w // 2
    cur = build_layers(b, cur, layers=range(done, hp.n_layer))
    cur = build_norm(b, cur, "v.post_ln", "post_ln", kind="layer")
    cur = build_norm(b, build_merged(b, cur, 2, grid), "mm.input_norm", "mm_norm", kind="layer", eps=1e-6)
    b.result("features", build_mlp(b, cur, "mm.up", "mm.down", cur.ne[0], "gelu_erf"))


def _build_merger(b: TowerBuild[MiniCPMVHParams], cur: Tensor) -> Tensor:
    """One row for each square of 2 x 2 patches: ne [n_embd, n_squares, n_pictures]."""
    hp, role = b.hparams, "v.vit_merger"
    squares = build_merged(b, cur, 2)
    _, n_squares, n, _ = squares.ne
    patches = gg.reshape_3d(squares, hp.n_embd, 4, n_squares * n)
    normed = build_norm(b, patches, f"{role}.ln1", "merger_ln1", kind="layer")
    patches = gg.add(patches, build_self_attn(b, normed, -1, prefix="vit_merger."))
    mean = gg.mean(gg.cont(gg.transpose(patches)))
    rows = gg.reshape_3d(patches, 4 * hp.n_embd, n_squares, n)
    rows = build_norm(b, rows, f"{role}.ds_ln", "merger_ds_ln", kind="layer")
    rows = build_mlp(b, rows, f"{role}.ds_ffn_up", f"{role}.ds_ffn_down", 4 * hp.n_ff, "gelu", hp.n_embd)
    return b.cb(gg.add(rows, gg.reshape_3d(mean, hp.n_embd, n_squares, n)), "merger_out")


def _encode(run: TowerRun[MiniCPMVHParams], arrays: Arrays) -> Encoded:
    """The features of the whole picture, then those of its slices, whose patches lie in one line."""
    p = run.hparams.patch_size
    line = array_of(arrays, "pixel_values", (3, p, None))
    sizes = sizes_of_tiles(arrays, "target_sizes", run.hparams.factor)
    ends = np.cumsum([h * w * p for h, w in sizes])
    if ends[-1] != line.shape[2]:
        raise ShapeError(f"target_sizes has {ends[-1] // p} patches, where pixel_values has {line.shape[2] // p}")
    slices: list[Array] = []
    for (h, w), patches in zip(sizes, np.split(line, ends[:-1], axis=2), strict=True):
        lines: Array = np.moveaxis(patches.reshape(3, p, h, w, p), 1, 2)
        slices.append(lines.reshape(3, h * p, w * p))
    return Encoded(Features(rows_of_tiles(run, slices)))


def _least(hp: MiniCPMVHParams) -> TowerSize:
    return TowerSize(1, hp.factor, hp.factor)


TOWERS = (Tower(("minicpmv4_6",), _read, _build, _encode, _least),)
