"""Hyper-connections (arXiv 2409.19606, 2512.24880): each token has several residual streams instead of one.

A block (the attention or the network of a layer) reads a weighted sum of the streams. Its output is added to every
stream, with a weight for each stream. The weights are computed from all streams of the token together.

In DeepSeek-V4 (mHC) the streams are also mixed with each other, by a matrix whose rows and columns each sum to 1.
Sinkhorn's iteration makes that matrix. In Hunyuan (iHC) the streams are not mixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from pyggml import ops as gg
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .blocks import Build, build_inp_embd, build_lm_head, build_norm, build_out_rows, build_out_streams
from .hparams import HParams
from .metadata import Reader


@dataclass(frozen=True, kw_only=True)
class HyperHParams(HParams):
    """Hyperparameters of models with hyper-connections.

    n_stream        residual streams of a token
    f_hc_eps        a small number that is added to the weights
    n_sinkhorn      iterations that make the matrix which mixes the streams; 0: the streams are not mixed
    f_hc_magnitude  the largest weight with which a block's output is added to a stream; 0: the largest is 2, and
                    f_hc_eps is not added
    """

    n_stream: int
    f_hc_eps: float
    n_sinkhorn: int = 0
    f_hc_magnitude: float = 0.0


S = TypeVar("S", bound=HyperHParams)
_COUNT, _SINKHORN, _EPS = (f"{{arch}}.hyper_connection.{key}" for key in ("count", "sinkhorn_iterations", "epsilon"))
_MAX_STREAMS, _MAX_SINKHORN = 64, 100  # so that a file with wrong numbers does not cost much memory


def read_hyper(r: Reader, *, mixed: bool = True) -> dict[str, Any]:
    """Read what a file says of hyper-connections. `mixed`: streams are mixed with each other. Raises ModelError."""
    n_sinkhorn = r.integer(_SINKHORN) if mixed else 0
    if mixed and not 0 < n_sinkhorn <= _MAX_SINKHORN:
        r.fail(_SINKHORN, f"is {n_sinkhorn}, not from 1 to {_MAX_SINKHORN}")
    return {"n_stream": read_streams(r), "n_sinkhorn": n_sinkhorn, "f_hc_eps": r.number(_EPS)}


def read_streams(r: Reader) -> int:
    """How many residual streams a token has. Raises ModelError."""
    n = r.integer(_COUNT)
    if not 0 < n <= _MAX_STREAMS:
        r.fail(_COUNT, f"is {n}, not from 1 to {_MAX_STREAMS}")
    return n


class Put(NamedTuple):
    """How the output of a block (attention or network) is added to the streams.

    weights  the weight of the output in each stream: ne [n_stream, n_tokens]
    comb     how much of each stream (rows) goes to each stream (columns): ne [n_stream, n_stream, n_tokens]; None: the
             streams stay as they are
    """

    weights: Tensor
    comb: Tensor | None = None


@dataclass(frozen=True)
class Mix(Generic[S]):
    """How blocks read the streams, ne [n_embd, n_stream, n_tokens].

    read  called with the build, the streams, the block's name (`attn` or `ffn`) and the layer: gives the normed input
          of the block, ne [n_embd, n_tokens], and how its output is put back
    head  called with the build and the streams: gives the normed row that the logits are a product of, ne
          [n_embd, n_tokens]
    """

    read: Callable[[Build[S], Tensor, str, int], tuple[Tensor, Put]]
    head: Callable[[Build[S], Tensor], Tensor]


def build_hyper(
    b: Build[S],
    mix: Mix[S],
    attention: Callable[[Tensor, int], Tensor],
    ffn: Callable[[Tensor, int], Tensor],
    before: Callable[[Tensor, int], Tensor] | None = None,
) -> Graph:
    """Build the graph of one ubatch of a decoder with hyper-connections; its last node `result_output` has ne
    [n_vocab, n_outputs].

    attention, ffn  called with the input of the block, ne [n_embd, n_tokens], and the layer: give its output
    before          called with the streams and the layer when a layer begins: gives the streams that the layer starts
                    from
    """
    hp = b.hparams
    n = hp.n_stream
    embd = gg.reshape_3d(build_inp_embd(b), hp.n_embd, 1, b.n_tokens)
    x = b.cb(gg.repeat_4d(embd, hp.n_embd, n, b.n_tokens, 1), "hc_init")
    for il in range(hp.n_layer):
        if before is not None:
            x = before(x, il)
        cur, put = mix.read(b, x, "attn", il)
        cur = attention(cur, il)
        cur, weights = build_out_rows(b, il, cur, put.weights)
        put = Put(weights, None if put.comb is None else build_out_streams(b, il, put.comb))
        x = b.cb(put_back(cur, build_out_streams(b, il, x), put), "hc_attn_post", il)
        cur, put = mix.read(b, x, "ffn", il)
        x = b.cb(put_back(ffn(cur, il), x, put), "l_out", il)
    return build_lm_head(b, mix.head(b, x))


def weighted_streams(x: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the streams `x`, ne [n_embd, n_stream, n_tokens], of each token; `weights` has ne [n_stream,
    n_tokens]. The result has ne [n_embd, n_tokens]."""
    n, n_tokens = weights.ne[:2]
    return gg.reshape_2d(gg.out_prod(x, gg.reshape_3d(weights, 1, n, n_tokens)), x.ne[0], n_tokens)


def put_back(cur: Tensor, x: Tensor, put: Put) -> Tensor:
    """The streams `x`, ne [n_embd, n_stream, n_tokens], mixed as `put` says, plus the weighted output `cur` of the
    block, ne [n_embd, n_tokens]."""
    n_embd, n, n_tokens, _ = x.ne
    weights = put.weights if put.weights.is_contiguous else gg.cont(put.weights)
    add = gg.out_prod(gg.reshape_3d(cur, n_embd, 1, n_tokens), gg.reshape_3d(weights, n, 1, n_tokens))
    return gg.add(add, x if put.comb is None else gg.out_prod(x, put.comb))


# -- the kinds of DeepSeek and Hunyuan --------------------------------------------------------------------------------


def _mixes(b: Build, x: Tensor, role: str, n_out: int, il: int) -> Tensor:
    """The numbers from which the weights are made, ne [n_out, n_tokens]: all streams of a token are normed as one row
    and multiplied by a matrix."""
    n_embd, n, n_tokens, _ = x.ne
    flat = build_norm(b, gg.reshape_2d(x, n * n_embd, n_tokens), "", "hc_normed", il)
    return b.cb(b.mul_mat(b.weight(f"{role}_fn", (n * n_embd, n_out), il), flat), "hc_mixes", il)


def _affine(b: Build, mixes: Tensor, role: str, part: int, n_part: int, first: int, n: int, il: int) -> Tensor:
    """`n` rows of `mixes` from row `first` on, times the scale of part number `part`, plus their base: ne [n,
    n_tokens]."""
    base = b.weight(f"{role}_base", (mixes.ne[0],), il)
    scale = b.weight(f"{role}_scale", (n_part,), il)
    cur = gg.view_2d(mixes, n, mixes.ne[1], mixes.nb[1], first * mixes.nb[0])
    cur = gg.mul(cur, gg.view_1d(scale, 1, part * scale.nb[0]))
    return gg.add(cur, gg.view_1d(base, n, first * base.nb[0]))


def _read(b: Build[HyperHParams], x: Tensor, part: str, il: int) -> tuple[Tensor, Put]:
    hp = b.hparams
    n, n_tokens, role = hp.n_stream, x.ne[2], f"hc_{part}"
    n_part = 3 if hp.n_sinkhorn else 2
    mixes = _mixes(b, x, role, (2 + n if hp.n_sinkhorn else 2) * n, il)
    pre = gg.scale_bias(gg.sigmoid(_affine(b, mixes, role, 0, n_part, 0, n, il)), 1.0, hp.f_hc_eps)
    post = gg.sigmoid(_affine(b, mixes, role, 1, n_part, n, n, il))
    post = gg.scale_bias(post, hp.f_hc_magnitude, hp.f_hc_eps) if hp.f_hc_magnitude else gg.scale(post, 2.0)
    comb = None
    if hp.n_sinkhorn:
        comb = gg.reshape_3d(_affine(b, mixes, role, 2, n_part, 2 * n, n * n, il), n, n, n_tokens)
        comb = b.cb(sinkhorn(comb, hp.n_sinkhorn, hp.f_hc_eps), "hc_comb", il)
    cur = b.cb(weighted_streams(x, b.cb(pre, "hc_pre", il)), f"hc_{part}_pre", il)
    return build_norm(b, cur, f"{part}_norm", f"{part}_norm", il), Put(b.cb(post, "hc_post", il), comb)


def sinkhorn(comb: Tensor, n_iter: int, eps: float) -> Tensor:
    """Make the rows and columns of `comb`, ne [n, n, n_tokens], sum to 1 (nearly).

    Begins with a softmax of each row, plus `eps`. Then columns are divided by their sums, and `n_iter` - 1 times rows
    and columns are; `eps` is added to each sum."""
    # Columns are divided as rows of the transposed matrix, so each turn transposes first.
    cur = gg.scale_bias(gg.soft_max(comb), 1.0, eps)
    for _ in range(2 * n_iter - 1):
        cur = gg.cont(gg.permute(cur, 1, 0, 2, 3))
        cur = gg.div(cur, gg.scale_bias(gg.sum_rows(cur), 1.0, eps))
    return gg.cont(gg.permute(cur, 1, 0, 2, 3))


def head_by_weights(b: Build[HyperHParams], x: Tensor) -> Tensor:
    """The normed row that the logits are a product of: a sum of the streams, weighted by numbers made from them."""
    hp = b.hparams
    mixes = _mixes(b, x, "output_hc", hp.n_stream, -1)
    pre = gg.sigmoid(_affine(b, mixes, "output_hc", 0, 1, 0, hp.n_stream, -1))
    cur = b.cb(weighted_streams(x, gg.scale_bias(pre, 1.0, hp.f_hc_eps)), "hc_head")
    return build_norm(b, cur, "output_norm", "result_norm")


def head_by_mean(b: Build, x: Tensor) -> Tensor:
    """The normed row that the logits are a product of: the mean of the streams."""
    n_embd, n, n_tokens, _ = x.ne
    total = gg.view_2d(x, n_embd, n_tokens, x.nb[2], 0)
    for i in range(1, n):
        total = gg.add(total, gg.view_2d(x, n_embd, n_tokens, x.nb[2], i * x.nb[1]))
    return build_norm(b, b.cb(gg.scale(total, 1.0 / n), "hc_head"), "output_norm", "result_norm")


BY_WEIGHTS, BY_MEAN = Mix(_read, head_by_weights), Mix(_read, head_by_mean)
