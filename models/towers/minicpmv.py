"""MiniCPM-V: SigLIP for slices of any size, whose positions are fractions of the slice.

minicpmv4_6  MiniCPM-V 4.6: squares of 2 x 2 patches become one, first between two layers and again at the end. At the
             first merger the patches of a square see each other; a network makes one row of their four, to which their
             mean is added. Towers for text in small print leave it out ("4x", `factor` 2)
resampler    MiniCPM-V 2.6 and MiniCPM-o 2.6 (arXiv 2408.01800): learned queries attend to the patches, so each slice
             has as many features as there are queries
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import numpy as np

from pyggml import ops as gg
from pyggml.errors import ShapeError
from pyggml.media import Features
from pyggml.tensor import Tensor

from ..blocks.norm import build_norm
from ..blocks.tower import TowerBuild, TowerSize
from ..blocks.vision import attend, build_layers, build_merged, build_mlp, build_patches, build_self_attn, to_f32
from ..metadata import Reader
from .hparams import VisionHParams, read_vision
from .llava import integers
from .shuffled import edges_of, float_range, rows_of_tiles, sizes_of_tiles
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
    return _encode_slices(run, arrays, run.hparams.factor)


def _encode_slices(run: TowerRun[VisionHParams], arrays: Arrays, factor: int) -> Encoded:
    """The features of the whole picture, then those of its slices, whose patches lie in one line; a slice is of squares
    of `factor` x `factor` patches."""
    p = run.hparams.patch_size
    line = array_of(arrays, "pixel_values", (3, p, None))
    sizes = sizes_of_tiles(arrays, "target_sizes", factor)
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


# -- MiniCPM-V 2.6 ----------------------------------------------------------------------------------------------------

_HEAD = 128  # elements of a head of the resampler


def _read_resampler(r: Reader) -> VisionHParams:
    return read_vision(VisionHParams, r)


def _build_resampler(b: TowerBuild[VisionHParams]) -> None:
    hp = b.hparams
    n, h, w = b.size
    table = b.weights.ne("v.position_embd.weight")
    side = hp.side if table is None else isqrt(table[1])  # files of llama.cpp have another image_size

    def places() -> Array:
        """For each patch the learned position that its fraction of the slice falls to, rounded as torch does."""
        line, column = (np.searchsorted(edges_of(side), float_range(0, 1 - 1e-6, 1 / n), side="right") for n in (h, w))
        return (line[:, None] * side + column).reshape(-1).astype(np.int32)

    learned = gg.get_rows(b.weight("v.position_embd", (hp.n_embd, side**2)), b.constant("positions", places))
    cur = build_layers(b, b.cb(gg.add(build_patches(b), learned), "pos_embd"))
    cur = build_norm(b, cur, "v.post_ln", "post_ln", kind="layer")

    n_out, queries = hp.n_embd_out, b.weights.ne("resampler.query")
    n_queries = 1 if queries is None else queries[1]
    query = to_f32(b.weight("resampler.query", (n_out, n_queries), suffix=""))
    b.optional("resampler.pos_embed_k", (n_out, 70 * 70), suffix="")  # of llama.cpp's files; it is computed here
    if n_out % _HEAD:
        raise ShapeError(f"features of {n_out} elements make no heads of {_HEAD}")
    if n_out != hp.n_embd:
        cur = b.linear("resampler.kv", cur, n_out, "resampler_kv")
    cur = build_norm(b, cur, "resampler.ln_kv", "resampler_ln_kv", kind="layer", eps=1e-6)
    places_of_keys = b.constant("resampler_positions", lambda: sines_of_places(h, w, n_out))
    q = build_norm(b, query, "resampler.ln_q", "resampler_ln_q", kind="layer", eps=1e-6)
    k = gg.add(cur, places_of_keys)
    q, k, v = (
        gg.reshape_4d(b.linear(f"resampler.attn.{x}", t, n_out, f"resampler_{x}"), _HEAD, n_out // _HEAD, *t.ne[1:3])
        for x, t in (("q", q), ("k", k), ("v", cur))
    )
    q = gg.repeat_4d(q, *q.ne[:3], n)
    cur = gg.reshape_3d(attend(b, q, k, v, -1), n_out, n_queries, n)
    cur = b.linear("resampler.attn.out", cur, n_out, "resampler_attn_out")
    cur = build_norm(b, cur, "resampler.ln_post", "resampler_ln_post", kind="layer", eps=1e-6)
    b.result("features", b.linear("resampler.proj", cur, n_out, "resampler_proj"))


def sines_of_places(h: int, w: int, n: int) -> Array:
    """The fixed embeddings of `h` x `w` places, line by line: float32 [h * w, n]. A quarter each: sines and cosines of
    the column, sines and cosines of the line, from the fastest on. All in float32, as the model was trained."""
    steps = np.arange(n // 4, dtype=np.float32) / np.float32(n / 4)
    turns: Array = 1 / np.power(np.full_like(steps, 10000), steps)
    places = np.indices((h, w)).reshape(2, -1, 1).astype(np.float32)
    line, column = np.multiply(places[0], turns), np.multiply(places[1], turns)
    return np.concatenate([np.sin(column), np.cos(column), np.sin(line), np.cos(line)], axis=1)


def _one_patch(hp: VisionHParams) -> TowerSize:
    return TowerSize(1, 1, 1)


def _encode_resampled(run: TowerRun[VisionHParams], arrays: Arrays) -> Encoded:
    return _encode_slices(run, arrays, 1)


TOWERS = (
    Tower(("minicpmv4_6",), _read, _build, _encode, _least),
    Tower(("resampler",), _read_resampler, _build_resampler, _encode_resampled, _one_patch),
)
