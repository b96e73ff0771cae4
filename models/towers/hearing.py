"""Whisper's encoder (arXiv 2212.04356), and the towers of text models that hear through it.

Two convolutions halve the number of log-mel frames. Positions are learned, and every moment sees all others.

whisper  the states after the last norm, one for each 20 milliseconds of 30 seconds
qwen2a   Qwen2-Audio (arXiv 2407.10759): only the moments of the sound itself; the mean of each two is normed, and
         projected into the text
voxtral  Voxtral (arXiv 2507.13264): several states side by side go through a network. A longer sound is heard in parts
         of 30 seconds
ultravox Ultravox (github.com/fixie-ai/ultravox): only the moments of the sound itself, in parts of 30 seconds; several
         states side by side go through a network with a gate and two norms
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.errors import ShapeError
from pyggml.media import Features
from pyggml.ops.im2col import im2col
from pyggml.ops.pad import pad
from pyggml.tensor import Tensor

from ..blocks.ffn import ACTIVATIONS
from ..blocks.norm import build_norm
from ..blocks.tower import TowerBuild, TowerSize
from ..blocks.vision import build_layers, build_optional_norm, to_f32
from ..metadata import Reader
from .hparams import TowerHParams, read_tower
from .tower import Arrays, Encoded, Tower, TowerRun, array_of

_MAX_POSITIONS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class SoundHParams(TowerHParams):
    """n_mels   features of a frame
    n_pos    positions that the tower knows: half as many as the frames that it hears at a time
    n_stack  states that become one row of features"""

    n_mels: int
    n_pos: int
    n_stack: int


def _read(r: Reader) -> SoundHParams:
    n_mels = r.integer("{arch}.num_mel_bins")
    n_pos = r.integer("{arch}.max_pos_emb", 1500)
    n_stack = r.integer("{arch}.projector.stack_factor", 0) or 1
    if not 0 < n_mels <= 1024:
        r.fail("{arch}.num_mel_bins", f"is {n_mels}: 1 to 1024 are supported")
    if not 1 < n_pos <= _MAX_POSITIONS:
        r.fail("{arch}.max_pos_emb", f"is {n_pos}: 2 to {_MAX_POSITIONS} are supported")
    if n_stack > n_pos:
        r.fail("{arch}.projector.stack_factor", f"is {n_stack}: {n_pos} states make no such groups")
    return read_tower(SoundHParams, r, "gelu_erf", n_mels=n_mels, n_pos=n_pos, n_stack=n_stack)


def _read_grouped(r: Reader) -> SoundHParams:
    """For a tower whose groups of states all are whole."""
    hp = _read(r)
    if hp.n_pos % hp.n_stack:
        r.fail("{arch}.projector.stack_factor", f"is {hp.n_stack}: {hp.n_pos} states make no such groups")
    return hp


# -- graphs ------------------------------------------------------------------------------------------------------------


def _n_frames(hp: SoundHParams, n: int) -> int:
    """Frames that `n` moments are made of: two each, and those that the convolutions see at the end."""
    return 2 * min(n + 1, hp.n_pos)


def build_states(b: TowerBuild[SoundHParams], n_frames: int, n: int) -> Tensor:
    """The states of the first `n` moments of `input_features`, an input of ne [n_frames, n_mels]: ne [n_embd, n]. The
    last norm is somebody else's."""
    hp = b.hparams
    frames = b.input("input_features", (n_frames, hp.n_mels))
    cur = gg.gelu_erf(_convolved(b, frames, 1, 1))
    cur = gg.gelu_erf(_convolved(b, gg.cont(gg.transpose(cur)), 2, 2))
    if cur.ne[1] > n:
        cur = gg.cont(gg.view_2d(cur, cur.ne[0], n, cur.nb[1], 0))
    positions = to_f32(b.weight("a.position_embd", (hp.n_embd, hp.n_pos)))
    if n < hp.n_pos:
        positions = gg.view_2d(positions, hp.n_embd, n, positions.nb[1], 0)
    return build_layers(b, b.cb(gg.add(cur, positions), "pos_embd"))


def _convolved(b: TowerBuild[SoundHParams], cur: Tensor, i: int, step: int) -> Tensor:
    """The convolution number `i` of `cur`, ne [n, n_channels], with three frames at a time: ne [n_embd, n / step]."""
    n_embd, n_channels = b.hparams.n_embd, cur.ne[1]
    kernel = b.weight(f"a.conv1d.{i}", (3, n_channels, n_embd))
    type_ = DType.F16 if kernel.dtype is DType.F16 else DType.F32
    columns = im2col(kernel, cur, step, 0, 1, 0, 1, 0, False, type_)  # [3 * n_channels, n / step]
    cur = b.cb(gg.mul_mat(gg.reshape_2d(kernel, 3 * n_channels, n_embd), columns), f"conv1d_{i}")
    bias = b.weight(f"a.conv1d.{i}", (1, n_embd), suffix="bias")
    return b.cb(gg.add(cur, gg.reshape_1d(to_f32(bias), n_embd)), f"conv1d_{i}")


def _build_moments(b: TowerBuild[SoundHParams]) -> Tensor:
    """The states of the first `size.w` moments of a sound that silence follows."""
    return build_states(b, _n_frames(b.hparams, b.size.w), b.size.w)


def _normed(b: TowerBuild[SoundHParams], cur: Tensor) -> Tensor:
    return build_norm(b, cur, "a.post_ln", "post_ln", kind="layer")


def _build_whisper(b: TowerBuild[SoundHParams]) -> None:
    b.result("features", _normed(b, _build_moments(b)))


def _build_qwen2a(b: TowerBuild[SoundHParams]) -> None:
    cur = _build_moments(b)
    n_embd, n = cur.ne[0], cur.ne[1] // 2
    first, second = (gg.view_2d(cur, n_embd, n, 2 * cur.nb[1], i * cur.nb[1]) for i in (0, 1))
    cur = b.cb(gg.scale(gg.add(gg.cont(first), second), 0.5), "pooled")
    b.result("features", b.linear("mm.a.fc", _normed(b, cur), b.hparams.n_embd_out, "features"))


def _build_voxtral(b: TowerBuild[SoundHParams]) -> None:
    hp, cur = b.hparams, _normed(b, _build_moments(b))
    cur = gg.reshape_2d(cur, hp.n_embd * hp.n_stack, cur.ne[1] // hp.n_stack)
    cur = ACTIVATIONS["gelu_erf"](b.linear("mm.a.mlp.1", cur, hp.n_embd_out, "mlp_1"))
    b.result("features", b.linear("mm.a.mlp.2", cur, hp.n_embd_out, "features"))


def _build_ultravox(b: TowerBuild[SoundHParams]) -> None:
    """`size.w` frames, behind which nothing is heard. What lacks in the last group of states is 0."""
    hp, n_frames = b.hparams, b.size.w
    cur = _normed(b, build_states(b, n_frames, (n_frames - 1) // 2 + 1))
    cur = pad(cur, 0, -cur.ne[1] % hp.n_stack, 0, 0)
    cur = gg.reshape_2d(cur, hp.n_embd * hp.n_stack, cur.ne[1] // hp.n_stack)
    cur = build_norm(b, cur, "mm.a.norm_pre", "norm_pre", kind="rms", eps=1e-6)
    ne = b.weights.ne("mm.a.mlp.1.weight")
    cur = gg.swiglu_swapped(b.linear("mm.a.mlp.1", cur, hp.n_embd_out if ne is None else ne[1], "mlp_1"))
    cur = build_optional_norm(b, cur, "mm.a.norm_mid", "rms", 1e-6)
    cur = b.linear("mm.a.mlp.2", cur, hp.n_embd_out, "mlp_2")
    b.result("features", build_optional_norm(b, cur, "mm.a.norm_post", "rms", 1e-6))


# -- what the processor gives ----------------------------------------------------------------------------------------


def _encode_all(run: TowerRun[SoundHParams], arrays: Arrays) -> Encoded:
    """All moments of each part of 30 seconds."""
    hp = run.hparams
    parts = array_of(arrays, "input_features", (None, hp.n_mels, 2 * hp.n_pos))
    size = TowerSize(1, 1, hp.n_pos)
    rows = [run(size, input_features=part)["features"].reshape(-1, hp.n_embd_out) for part in parts]
    return Encoded(Features(np.concatenate(rows)))


def _encode_own(run: TowerRun[SoundHParams], arrays: Arrays) -> Encoded:
    """The moments of the sound itself, without the silence that makes it 30 seconds long."""
    hp = run.hparams
    frames = array_of(arrays, "input_features", (1, hp.n_mels, 2 * hp.n_pos))[0]
    n_own = int(array_of(arrays, "feature_attention_mask", (1, 2 * hp.n_pos), np.int32).sum())
    n = (n_own - 1) // 2 + 1
    if n < 2:
        raise ShapeError(f"a sound of {n_own} frames (of 10 milliseconds) is too short: the tower hears 3 or more")
    own = np.ascontiguousarray(frames[:, : _n_frames(hp, n)])
    return Encoded(Features(run(TowerSize(1, 1, n), input_features=own)["features"].reshape(-1, hp.n_embd_out)))


def _encode_frames(run: TowerRun[SoundHParams], arrays: Arrays) -> Encoded:
    """All frames, in parts of 30 seconds."""
    hp = run.hparams
    frames = array_of(arrays, "input_features", (1, hp.n_mels, None))[0]
    parts = np.split(frames, range(2 * hp.n_pos, frames.shape[1], 2 * hp.n_pos), axis=1)
    rows = [run(TowerSize(1, 1, p.shape[1]), input_features=np.ascontiguousarray(p))["features"] for p in parts]
    return Encoded(Features(np.concatenate([r.reshape(-1, hp.n_embd_out) for r in rows])))


def _least(hp: SoundHParams) -> TowerSize:
    return TowerSize(1, 1, hp.n_stack if hp.n_stack > 1 else 2)


TOWERS = (
    Tower(("whisper",), _read, _build_whisper, _encode_all, _least, "a"),
    Tower(("qwen2a",), _read, _build_qwen2a, _encode_own, _least, "a"),
    Tower(("voxtral",), _read_grouped, _build_voxtral, _encode_all, _least, "a"),
    Tower(("ultravox",), _read, _build_ultravox, _encode_frames, _least, "a"),
)
