"""Blocks of towers that see: patches, positions, layers, poolers. Those of layers serve towers that hear, too.

Values of several pictures have ne [n_embd, n_tokens, n_pictures].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.ops import region
from pyggml.ops.im2col import im2col
from pyggml.ops.pad import pad
from pyggml.tensor import Tensor

from ..hparams import Activation, NormKind
from .ffn import ACTIVATIONS
from .norm import build_norm
from .tower import TowerBuild

if TYPE_CHECKING:
    from ..towers.hparams import TowerHParams, VisionHParams

AnyBuild: TypeAlias = "TowerBuild[TowerHParams]"
VisionBuild: TypeAlias = "TowerBuild[VisionHParams]"
# Turns the heads of Q or K, ne [n_embd_head, n_head, n_tokens, n_pictures], given the number of the first token.
Rope = Callable[[Tensor, int], Tensor]
Windows = Sequence[tuple[int, int]]  # (number of windows, tokens of each), for tokens that lie window by window

PIECE = 4096  # tokens of a large picture that go through a layer at a time


def build_patches(b: VisionBuild, n_channels: int = 3) -> Tensor:
    """The embeddings of the patches of `pixel_values`, an input of ne [width, height, channels, n_pictures]: ne
    [n_embd, h * w, n_pictures], rows of patches from top to bottom. A convolution with patches as large as its
    steps."""
    n, h, w = b.size
    n_embd, p = b.hparams.n_embd, b.hparams.patch_size
    pixels = b.input("pixel_values", (w * p, h * p, n_channels, n))
    kernel = b.weight("v.patch_embd", (p, p, n_channels, n_embd))
    columns = im2col(kernel, pixels, p, p, 0, 0, 1, 1, True, DType.F32)  # [p * p * channels, w, h, n]
    columns = gg.reshape_3d(columns, columns.ne[0], w * h, n)
    cur = b.cb(gg.mul_mat(gg.reshape_2d(kernel, p * p * n_channels, n_embd), columns), "patch_embd")
    bias = b.optional("v.patch_embd", (n_embd,), suffix="bias")
    return cur if bias is None else b.cb(gg.add(cur, bias), "patch_embd")


def build_class_token(b: AnyBuild, cur: Tensor, last: bool = False) -> Tensor:
    """Put the embedding of the class before the patches of each picture, or behind them: ne [n_embd, 1 + n_tokens,
    n_pictures]."""
    n_embd, n = cur.ne[0], cur.ne[2]
    token = gg.repeat_4d(to_f32(b.weight("v.class_embd", (n_embd,), suffix="")), n_embd, 1, n, 1)
    return b.cb(gg.concat(cur, token, 1) if last else gg.concat(token, cur, 1), "class_embd")


def to_f32(t: Tensor) -> Tensor:
    """A tensor that something is added to, in F32."""
    return t if t.dtype is DType.F32 else gg.cast(t, DType.F32)


def build_learned_positions(b: AnyBuild, cur: Tensor) -> Tensor:
    """Add the embeddings of positions, one for each token."""
    positions = b.weight("v.position_embd", cur.ne[:2])
    return b.cb(gg.add(cur, to_f32(positions)), "pos_embd")


def build_optional_norm(b: AnyBuild, cur: Tensor, role: str, kind: NormKind, eps: float = 0.0, il: int = -1) -> Tensor:
    """The norm of that role, when the tower has it; else `cur`."""
    if b.optional(role, cur.ne[:1], il) is None:
        return cur
    return build_norm(b, cur, role, role.partition(".")[2], il, kind, eps=eps)


def build_layers(
    b: AnyBuild,
    cur: Tensor,
    *,
    norm: NormKind = "layer",
    gated: bool = False,
    rope: Rope | None = None,
    windows: Callable[[int], Windows | None] | None = None,
    causal: bool = False,
    after: Callable[[Tensor, int], None] | None = None,
    layers: range | None = None,
) -> Tensor:
    """The layers of the encoder, each of which norms before attention and before its network, and adds both: ne of
    `cur`.

    norm     the kind of their norms
    gated    the network has a gate
    rope     turns Q and K by their positions
    windows  which windows the tokens of a layer see each other in; None: all tokens see each other
    causal   tokens do not see those that follow
    after    called with the result of each layer
    layers   which layers; None: all
    """
    for il in range(b.hparams.n_layer) if layers is None else layers:
        seen = None if windows is None else windows(il)
        layer = _Layer(b, il, norm, gated, rope, seen, causal)
        cut = cur.ne[1] > PIECE and cur.ne[2] == 1 and b.in_pieces and not causal
        cur = b.cb(layer.in_pieces(cur) if cut else layer.whole(cur), "l_out", il)
        b.graph.build_forward_expand(cur)
        if after is not None:
            after(cur, il)
    return cur


class _Layer(NamedTuple):
    """A layer of `build_layers`, whose arguments these are."""

    b: AnyBuild
    il: int
    norm: NormKind
    gated: bool
    rope: Rope | None
    windows: Windows | None
    causal: bool

    def whole(self, cur: Tensor, first: int = 0) -> Tensor:
        """The result of the layer for tokens that see no others, the first of which is the picture's `first`."""
        attn = build_self_attn(self.b, self.normed(cur), self.il, self.rope, self.windows, self.causal, first=first)
        return self.after_attn(cur, attn)

    def normed(self, cur: Tensor) -> Tensor:
        return build_norm(self.b, cur, self.b.own("ln1"), "ln1", self.il, self.norm)

    def after_attn(self, cur: Tensor, attn: Tensor) -> Tensor:
        """What becomes of the layer's input and the result of its attention: the sum, and the network."""
        b, il = self.b, self.il
        cur = b.cb(gg.add(cur, _layer_scaled(b, attn, "ls1", il)), "ffn_inp", il)
        normed = build_norm(b, cur, b.own("ln2"), "ln2", il, self.norm)
        out = build_network(b, normed, il, b.hparams.act, self.gated)
        return gg.add(cur, _layer_scaled(b, out, "ls2", il))

    def in_pieces(self, cur: Tensor) -> Tensor:
        """As `whole` of one large picture, in pieces: of all tokens together only the layer's input, which its result
        is written over, and, when all tokens see each other, Q, K and V are in memory."""
        n_tokens, row = cur.ne[1], cur.nb[1]
        if self.windows is not None:
            at = 0
            for n_windows, size in self.windows:
                most = max(PIECE // size, 1)
                for i in range(0, n_windows, most):
                    n = min(most, n_windows - i)
                    piece = self._replace(windows=[(n, size)]).whole(_tokens_of(cur, at, n * size), at)
                    cur = gg.set_2d(cur, piece, row, at * row)
                    at += n * size
            assert at == n_tokens, self.windows
            return cur
        pieces = [(at, min(PIECE, n_tokens - at)) for at in range(0, n_tokens, PIECE)]
        whole: list[Tensor] = []  # Q, K, V
        for at, n in pieces:
            parts = _build_qkv(self.b, self.normed(_tokens_of(cur, at, n)), self.il, self.rope, first=at)
            if not whole:
                whole.extend(pad(gg.cont(part), 0, 0, n_tokens - n, 0) for part in parts)
            else:
                for i, (t, part) in enumerate(zip(whole, parts, strict=True)):
                    whole[i] = region.set(t, part, t.nb[1], t.nb[2], t.nb[3], at * t.nb[2])
            for t in whole:  # so that nothing else of this piece is needed later
                self.b.graph.build_forward_expand(t)
        q, k, v = whole
        for at, n in pieces:
            attn = attend(self.b, _window_of(q, at, 1, n), k, v, self.il)
            piece = self.after_attn(_tokens_of(cur, at, n), _build_attn_out(self.b, attn, self.il))
            cur = gg.set_2d(cur, piece, row, at * row)
        return cur


def _tokens_of(cur: Tensor, at: int, n: int) -> Tensor:
    """Tokens `at` to `at + n` of one picture: ne [n_embd, n, 1]."""
    return gg.view_3d(cur, cur.ne[0], n, 1, cur.nb[1], cur.nb[2], at * cur.nb[1])


def _layer_scaled(b: AnyBuild, cur: Tensor, role: str, il: int) -> Tensor:
    """`cur` times one factor for each element of a row, when the tower has them (LayerScale, arXiv 2103.17239)."""
    scale = b.optional(b.own(role), cur.ne[:1], il)
    return cur if scale is None else b.cb(gg.mul(cur, scale), role, il)


def build_network(b: AnyBuild, cur: Tensor, il: int, act: Activation, gated: bool = False) -> Tensor:
    """down(act(up(cur))), or with a gate down(act(gate(cur)) * up(cur)): ne of `cur`."""
    n_embd, n_ff = cur.ne[0], b.hparams.n_ff
    up = b.linear(b.own("ffn_up"), cur, n_ff, "ffn_up", il)
    if gated:
        gate = b.cb(ACTIVATIONS[act](b.linear(b.own("ffn_gate"), cur, n_ff, "ffn_gate", il)), f"ffn_{act}", il)
        up = b.cb(gg.mul(gate, up), "ffn_gate_par", il)
    else:
        up = b.cb(ACTIVATIONS[act](up), f"ffn_{act}", il)
    return b.linear(b.own("ffn_down"), up, n_embd, "ffn_out", il)


def build_self_attn(
    b: AnyBuild,
    cur: Tensor,
    il: int,
    rope: Rope | None = None,
    windows: Windows | None = None,
    causal: bool = False,
    prefix: str = "",
    first: int = 0,
) -> Tensor:
    """Attention of all tokens of a picture (or of a window) to each other, and its projection: ne of `cur`.

    Q, K and V have weights of their own, or one together (`attn_qkv`). Those with weights of their own may have norms
    over all heads of a token. `prefix` comes before the roles of the weights; `first` is the number of the first
    token.
    """
    n_tokens, n = cur.ne[1:3]
    q, k, v = _build_qkv(b, cur, il, rope, prefix, first)
    if windows is None:
        return _build_attn_out(b, attend(b, q, k, v, il, _causal_mask(b, n_tokens) if causal else None), il, prefix)
    attn, at = None, 0
    for n_windows, size in windows:
        wq, wk, wv = (_window_of(t, at, n_windows, size) for t in (q, k, v))
        part = attend(b, wq, wk, wv, il)
        part = gg.reshape_4d(part, *q.ne[:2], n_windows * size, 1)
        attn = part if attn is None else gg.concat(attn, part, 2)
        at += n_windows * size
    assert attn is not None and at == n_tokens and n == 1, windows
    return _build_attn_out(b, attn, il, prefix)


def _build_qkv(
    b: AnyBuild, cur: Tensor, il: int, rope: Rope | None, prefix: str = "", first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V: ne [n_embd_head, n_head, n_tokens, n] each. See `build_self_attn`."""
    n_embd, n_tokens, n, _ = cur.ne
    n_head = b.hparams.n_head
    head = n_embd // n_head
    if b.optional(b.own(f"{prefix}attn_qkv"), (n_embd, 3 * n_embd), il) is not None:
        qkv = b.linear(b.own(f"{prefix}attn_qkv"), cur, 3 * n_embd, "qkv", il)
        size, row, picture = qkv.nb[0], qkv.nb[1], qkv.nb[2]
        q, k, v = (
            gg.view_4d(qkv, head, n_head, n_tokens, n, size * head, row, picture, size * n_embd * i) for i in range(3)
        )
    else:
        parts = (b.linear(b.own(f"{prefix}attn_{x}"), cur, n_embd, f"{x.upper()}cur", il) for x in "qkv")
        normed = (
            build_optional_norm(b, t, b.own(f"{prefix}attn_{x}_norm"), "rms", il=il)
            for x, t in zip("qkv", parts, strict=True)
        )
        q, k, v = (gg.reshape_4d(t, head, n_head, n_tokens, n) for t in normed)
    q, k = (rope(t, first) if rope is not None else t for t in (q, k))
    return b.cb(q, "Qcur", il), b.cb(k, "Kcur", il), b.cb(v, "Vcur", il)


def _build_attn_out(b: AnyBuild, attn: Tensor, il: int, prefix: str = "") -> Tensor:
    """The projection of what attention gives, ne [n_embd_head, n_head, n_tokens, n]: ne [n_embd, n_tokens, n]."""
    n_embd = attn.ne[0] * attn.ne[1]
    attn = b.cb(gg.reshape_3d(attn, n_embd, *attn.ne[2:]), "kqv_out", il)
    return b.linear(b.own(f"{prefix}attn_out"), attn, n_embd, "attn_out", il)


def _window_of(t: Tensor, at: int, n: int, size: int) -> Tensor:
    """Tokens `at` to `at + n * size` of Q, K or V: ne [n_embd_head, n_head, size, n]."""
    return gg.view_4d(t, *t.ne[:2], size, n, t.nb[1], t.nb[2], t.nb[2] * size, t.nb[2] * at)


def _causal_mask(b: AnyBuild, n: int) -> Tensor:
    """-inf where a token (row) would see one that follows: ne [n, n]."""
    return b.constant("causal", lambda: np.triu(np.full((n, n), -np.inf, np.float32), 1))


def attend(b: AnyBuild, q: Tensor, k: Tensor, v: Tensor, il: int, mask: Tensor | None = None) -> Tensor:
    """softmax(K q) V, of tensors of ne [n_embd_head, n_head, n_tokens, n]: ne [n_embd_head, n_head, n_tokens, n].

    Flash attention never stores the scores. When someone looks at them (`kq_soft_max_ext`), they are computed."""
    scale = 1 / sqrt(q.ne[0])
    q, k, v = (gg.permute(t, 0, 2, 1, 3) for t in (q, k, v))
    if not b.asked(f"kq_soft_max_ext-{il}"):
        return gg.flash_attn_ext(q, k, v, mask, scale)
    kq = b.cb(gg.soft_max_ext(gg.mul_mat(gg.cont(k), gg.cont(q)), mask, scale), "kq_soft_max_ext", il)
    return gg.cont(gg.permute(gg.mul_mat(gg.cont(gg.transpose(v)), kq), 0, 2, 1, 3))


def build_vit(b: VisionBuild, *, class_token: bool = False, post_norm: bool = True) -> Tensor:
    """A vision transformer (arXiv 2010.11929) on pictures of one size: ne [n_embd, n_tokens, n_pictures]. A norm before
    the layers (CLIP has it) and one after them are there when the tower has their weights; `post_norm` false: the norm
    after them is somebody else's."""
    cur = build_patches(b)
    if class_token:
        cur = build_class_token(b, cur)
    cur = build_optional_norm(b, build_learned_positions(b, cur), "v.pre_ln", "layer")
    cur = build_layers(b, cur)
    return build_optional_norm(b, cur, "v.post_ln", "layer") if post_norm else cur


def build_first_token(b: AnyBuild, cur: Tensor) -> Tensor:
    """The first token of each picture, that of the class: ne [n_embd, n_pictures]."""
    return gg.cont(gg.view_2d(cur, cur.ne[0], cur.ne[2], cur.nb[2], 0))


def build_mean(b: AnyBuild, cur: Tensor, first: int = 0) -> Tensor:
    """The mean of the tokens of each picture, from token `first` on: ne [n_embd, n_pictures]."""
    n_embd, n_tokens, n, _ = cur.ne
    rest = gg.view_3d(cur, n_embd, n_tokens - first, n, cur.nb[1], cur.nb[2], first * cur.nb[1])
    return gg.reshape_2d(gg.mean(gg.cont(gg.transpose(rest))), n_embd, n)


def build_attention_pool(b: AnyBuild, cur: Tensor) -> Tensor:
    """One row for each picture: what a learned query (`v.head.probe`) attends to, and a network after it: ne
    [n_embd, n_pictures] (SigLIP, arXiv 2303.15343)."""
    n_embd, n_tokens, n, _ = cur.ne
    n_head = b.hparams.n_head
    head = n_embd // n_head
    probe = gg.reshape_2d(to_f32(b.weight("v.head.probe", (n_embd,), suffix="")), n_embd, 1)
    q = gg.reshape_4d(b.linear("v.head.attn_q", probe, n_embd, "head_q"), head, n_head, 1, 1)
    q = gg.repeat_4d(q, head, n_head, 1, n)
    k, v = (
        gg.reshape_4d(b.linear(f"v.head.attn_{x}", cur, n_embd, f"head_{x}"), head, n_head, n_tokens, n) for x in "kv"
    )
    q, k, v = (gg.permute(t, 0, 2, 1, 3) for t in (q, k, v))
    attn = gg.reshape_2d(gg.flash_attn_ext(q, k, v, None, 1 / sqrt(head)), n_embd, n)
    cur = b.linear("v.head.attn_out", attn, n_embd, "head_attn_out")
    up = b.linear("v.head.ffn_up", build_norm(b, cur, "v.head.ln", "head_ln", kind="layer"), b.hparams.n_ff, "head_up")
    down = b.linear("v.head.ffn_down", ACTIVATIONS[b.hparams.act](up), n_embd, "head_down")
    return b.cb(gg.add(cur, down), "head_out")


def build_merged(b: AnyBuild, cur: Tensor, factor: int, grid: tuple[int, int] | None = None) -> Tensor:
    """Put the patches of each square of `factor` x `factor` into one row, line by line ("pixel shuffle"): ne
    [n_embd * factor^2, h / factor * w / factor, n_pictures]. `grid`: h and w of what was merged before."""
    h, w = grid or b.size[1:]
    n_embd, n = cur.ne[0], cur.ne[2]
    lines = gg.reshape_4d(cur, n_embd * factor, w // factor, factor, h // factor * n)
    squares = gg.cont(gg.permute(lines, 0, 2, 1, 3))
    return gg.reshape_3d(squares, n_embd * factor**2, (h // factor) * (w // factor), n)


def build_channels_merged(b: AnyBuild, cur: Tensor, kernel: Tensor, factor: int) -> Tensor:
    """As `build_merged`, with the patches of a square side by side for each channel, as a convolution reads them, and
    multiplied with `kernel`, ne [n_embd * factor^2, n_out]: ne [n_out, h / factor * w / factor, n_pictures]."""
    n, h, w = b.size
    n_embd = cur.ne[0]
    planes = gg.reshape_4d(gg.cont(gg.permute(cur, 1, 0, 2, 3)), w, h, n_embd, n)
    shape = gg.reshape_4d(kernel, factor, factor, n_embd, kernel.n_elements // (factor**2 * n_embd))
    columns = im2col(shape, planes, factor, factor, 0, 0, 1, 1, True, DType.F32)
    return gg.mul_mat(kernel, gg.reshape_3d(columns, columns.ne[0], columns.ne[1] * columns.ne[2], n))


def axis_weights(n: int, side: int, cubic: bool, corners: bool, antialias: bool = False) -> npt.NDArray[np.float64]:
    """How `n` positions along an axis are made of `side` learned ones, [n, side]: linear interpolation, or cubic
    convolution (Keys, a = -0.75). `corners`: the first and last ones fall together; else the ends of the axis do.
    Positions beyond the ends are those at the ends. `antialias` (of linear interpolation between the ends of the
    axis): fewer positions than learned ones are made of all that they stand for."""
    i = np.arange(n)
    if antialias:
        centre = (i[:, None] + 0.5) * side / n - 0.5
        found = np.maximum(1 - np.abs(np.arange(side) - centre) / max(side / n, 1), 0)
        return found / found.sum(1, keepdims=True)
    at = i * (side - 1) / max(n - 1, 1) if corners else (i + 0.5) * side / n - 0.5
    found = np.zeros((n, side))
    base = np.floor(at).astype(int)
    for tap in range(-1, 3) if cubic else range(2):
        d = np.abs(at - base - tap)
        near = ((1.25 * d - 2.25) * d) * d + 1 if cubic else np.maximum(1 - d, 0)
        far = ((-0.75 * d + 3.75) * d - 6) * d + 3
        np.add.at(found, (i, np.clip(base + tap, 0, side - 1)), np.where(d <= 1, near, far) if cubic else near)
    return found


def build_interpolated_positions(
    b: AnyBuild, side: int, *, cubic: bool = True, corners: bool = False, antialias: bool = False, first: int = 0
) -> Tensor:
    """The embeddings of the positions of `h` x `w` patches, made of a learned square of `side` x `side`: ne [n_embd,
    h * w], line by line. See `axis_weights`; `first`: how many positions come before the square."""
    h, w = b.size.h, b.size.w
    n_embd = b.hparams.n_embd
    table = to_f32(b.weight("v.position_embd", (n_embd, first + side * side)))
    square = gg.view_3d(table, n_embd, side, side, table.nb[1], table.nb[1] * side, table.nb[1] * first)
    if (h, w) == (side, side):
        return gg.reshape_2d(square if first == 0 else gg.cont(square), n_embd, h * w)
    of_w = b.constant("pos_of_columns", lambda: axis_weights(w, side, cubic, corners, antialias))
    of_h = b.constant("pos_of_lines", lambda: axis_weights(h, side, cubic, corners, antialias))
    lines = gg.mul_mat(of_w, gg.cont(gg.permute(square, 1, 0, 2, 3)))  # [w, n_embd, side]
    lines = gg.cont(gg.permute(lines, 1, 2, 0, 3))  # [side, w, n_embd]
    grid = gg.mul_mat(of_h, lines)  # [h, w, n_embd]
    return gg.reshape_2d(gg.cont(gg.permute(grid, 2, 1, 0, 3)), n_embd, h * w)


def build_rope_2d(b: AnyBuild, base: float, lines: Callable[[], npt.NDArray[np.int32]]) -> Rope:
    """Turns pairs (i, i + half a head): the first half of them by the patch's line, the others by its column, each from
    the fastest on. `lines()` gives line and column of each patch, [2, n_patches]."""
    quarter = b.hparams.n_embd // b.hparams.n_head // 4

    def turn(t: Tensor, first: int) -> Tensor:
        sections = (quarter, quarter, 0, 0)

        def positions() -> npt.NDArray[np.int32]:
            line, column = (axis[first : first + t.ne[2]] for axis in lines())
            return np.concatenate([line, column, np.zeros_like(line), np.zeros_like(line)]).astype(np.int32)

        at = b.constant(f"positions_{first}_{t.ne[2]}", positions)
        return gg.rope_multi(t, at, None, 2 * quarter, sections, "vision", 0, base, 1.0, 0.0, 1.0, 0.0, 0.0)

    return turn


def build_rope_halves(
    b: AnyBuild, base: float, places: Callable[[], npt.NDArray[np.integer[Any]]], scales: tuple[float, float] = (1, 1)
) -> Rope:
    """Turns neighbours: in the first half of a head by the first of two positions of each token, in the second half by
    the second one. `places()` gives these positions, [2, n_tokens]; the turns of a half are multiplied by its
    scale."""
    half = b.hparams.n_embd // b.hparams.n_head // 2

    def turn(t: Tensor, first: int) -> Tensor:
        def axis(i: int) -> Callable[[], npt.NDArray[np.int32]]:
            return lambda: places()[i][first : first + t.ne[2]].astype(np.int32)

        at = [b.constant(f"places_{i}_{first}_{t.ne[2]}", axis(i)) for i in (0, 1)]
        parts = [
            gg.rope_ext(
                gg.view_4d(t, half, *t.ne[1:], *t.nb[1:], t.nb[0] * half * i),
                at[i], None, half, "norm", 0, base, scales[i], 0.0, 1.0, 0.0, 0.0,
            )
            for i in (0, 1)
        ]  # fmt: skip
        return gg.concat(parts[0], parts[1], 0)

    return turn


def build_mlp(
    b: AnyBuild, cur: Tensor, first: str, second: str, n_hidden: int, act: Activation, n_out: int = 0
) -> Tensor:
    """second(act(first(cur))): ne [n_out, n_tokens, n_pictures], n_out being the features' by default."""
    cur = ACTIVATIONS[act](b.linear(first, cur, n_hidden, first))
    return b.linear(second, cur, n_out or b.hparams.n_embd_out, second)
