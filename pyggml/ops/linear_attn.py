"""Linear attention and related ops: each head has a state [S, S]. Keys and values change it, queries read it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..codec import Array
from ..opdef import Cost, OpDef, Params, Srcs, record, rule
from ..tensor import Ne, Tensor
from ._common import F32, src
from ._recurrence import check_rows, check_state, cost_of, n_slots, run

__all__ = [
    "gated_delta_net",
    "gated_linear_attn",
    "rwkv_wkv6",
    "rwkv_wkv7",
]


def _cost(t: Tensor) -> Cost:
    n = src(t.src, 0).ne[0]
    return cost_of(8 * n * n * src(t.src, 1).n_rows, t)


def _define(
    name: str,
    srcs: tuple[str, ...],
    params: tuple[str, ...],
    shape: Callable[[Srcs, Params], Ne],
    ref: Callable[..., Array],
) -> OpDef:
    return OpDef(
        name=name,
        srcs=srcs,
        params=params,
        shape=shape,
        dtypes={(F32,) * len(srcs): F32},
        ref=ref,
        kernel=name,
        cost=_cost,
        inplace=(),
        label=f"{name}({', '.join(srcs)})",
    )


def _token_rows(roles: tuple[str, ...]) -> Callable[[Srcs, Params], Ne]:
    """Shape rule: all sources have a row of S for each head and token; only tf has one for each head, and the states
    have shapes of their own."""

    def shape(srcs: Srcs, params: Params) -> Ne:
        first, state = src(srcs, 0), src(srcs, len(roles) - 1)
        check_rows(srcs, roles[:-1])
        check_state(state, "state")
        s, n_head, n_tokens, _ = first.ne
        for i, role in enumerate(roles[:-1]):
            ne = (s, n_head, 1, 1) if role == "tf" else (s, n_head, n_tokens, 1)
            rule(src(srcs, i).ne == ne, f"{role} must have ne {list(ne)}, not {list(src(srcs, i).ne)}")
        n_seqs = state.ne[1]
        rule(
            state.ne == (s * s * n_head, n_seqs, 1, 1) and n_tokens % n_seqs == 0,
            f"state must have ne [{s * s * n_head}, n_seqs], n_seqs a divisor of the {n_tokens} tokens",
        )
        return (s * n_head, n_tokens + s * n_seqs, 1, 1)

    return shape


def _by_sequence(state: Array, *tokens: Array) -> tuple[Array, ...]:
    """[n_seqs, n_head, S, S] of the states, and [n_seqs, n_tokens, n_head, S] of what tokens bring."""
    n_head, s = tokens[0].shape[2:]
    n_seqs = state.shape[2]
    return (state.reshape(n_seqs, n_head, s, s), *(x.reshape(n_seqs, -1, n_head, s) for x in tokens))


def _outer(rows: Array, columns: Array) -> Array:
    return rows[..., :, None] * columns[..., None, :]


def _wkv6_ref(k: Array, v: Array, r: Array, tf: Array, td: Array, state: Array) -> Array:
    s0, k, v, r, td = _by_sequence(state, k, v, r, td)

    def step(s: Array, t: int) -> tuple[Array, Array]:
        own = (r[:, t] * tf[0, 0] * k[:, t]).sum(axis=-1, keepdims=True)
        y = own * v[:, t] + np.einsum("nhi,nhij->nhj", r[:, t], s)
        return y, td[:, t][..., None] * s + _outer(k[:, t], v[:, t])

    return run(step, s0, k.shape[1])


def _gla_ref(k: Array, v: Array, q: Array, g: Array, state: Array, scale: float) -> Array:
    s0, k, v, q, g = _by_sequence(state, k, v, q, g)

    def step(s: Array, t: int) -> tuple[Array, Array]:
        own = (q[:, t] * k[:, t]).sum(axis=-1, keepdims=True) * scale
        y = own * v[:, t] + np.einsum("nhi,nhij->nhj", q[:, t] * g[:, t] * scale, s)
        return y, g[:, t][..., None] * s + _outer(k[:, t], v[:, t])

    return run(step, s0, k.shape[1])


def _wkv7_ref(r: Array, w: Array, k: Array, v: Array, a: Array, b: Array, state: Array) -> Array:
    s0, r, w, k, v, a, b = _by_sequence(state, r, w, k, v, a, b)

    def step(s: Array, t: int) -> tuple[Array, Array]:
        along = np.einsum("nhij,nhj->nhi", s, a[:, t])
        s = s * w[:, t][:, :, None, :] + _outer(v[:, t], k[:, t]) + _outer(along, b[:, t])
        return np.einsum("nhij,nhj->nhi", s, r[:, t]), s

    return run(step, s0, k.shape[1])


_WKV6 = ("k", "v", "r", "tf", "td", "state")
_WKV7 = ("r", "w", "k", "v", "a", "b", "state")
_GLA = ("k", "v", "q", "g", "state")
_GDN = ("q", "k", "v", "g", "beta", "state")

RWKV_WKV6 = _define("rwkv_wkv6", _WKV6, (), _token_rows(_WKV6), _wkv6_ref)
RWKV_WKV7 = _define("rwkv_wkv7", _WKV7, (), _token_rows(_WKV7), _wkv7_ref)
GATED_LINEAR_ATTN = _define("gated_linear_attn", _GLA, ("scale",), _token_rows(_GLA), _gla_ref)


def rwkv_wkv6(k: Tensor, v: Tensor, r: Tensor, tf: Tensor, td: Tensor, state: Tensor) -> Tensor:
    """The time mixing of RWKV-6 (ggml_rwkv_wkv6; arXiv 2404.05892). Per head and token, with s[key, value]:
    y = (r . tf k) v + r s, s = td * s + k v^T; tf and td scale the rows of keys.

    k, v, r, td (the decay, 0 to 1): F32, ne [S, n_head, n_tokens], the tokens of n_seqs sequences of equal length one
    after the other; tf (the bonus of the token itself): F32, ne [S, n_head]. Rows dense. state: F32, ne
    [S * S * n_head, n_seqs], contiguous: s with values side by side.
    Result: F32, ne [S * n_head, n_tokens + S * n_seqs]: y of all tokens, then the states after the last ones, laid out
    as `state`. Use views. Raises ShapeError, DTypeError.
    """
    return record(RWKV_WKV6, (k, v, r, tf, td, state), {})


def gated_linear_attn(k: Tensor, v: Tensor, q: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    """Gated linear attention (ggml_gated_linear_attn; arXiv 2312.06635). Per head and token, with s[key, value]:
    s' = g * s + k v^T and y = scale * q s', computed as scale * ((q . k) v + q (g * s)). g scales the rows of keys.

    Shapes, result and errors as in `rwkv_wkv6`, g in the place of td, without tf. scale is rounded to f32.
    """
    return record(GATED_LINEAR_ATTN, (k, v, q, g, state), {"scale": scale})


def rwkv_wkv7(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor) -> Tensor:
    """The time mixing of RWKV-7 (ggml_rwkv_wkv7; arXiv 2503.14456). Per head and token, with s[value, key]:
    s = s * w + v k^T + (s a) b^T, y = s r; w scales the columns of keys.

    r, w (the decay, 0 to 1), k, v, a, b: F32, ne [S, n_head, n_tokens]. state: F32, ne [S * S * n_head, n_seqs],
    contiguous: s with keys side by side. Order of tokens, result and errors as in `rwkv_wkv6`.
    """
    return record(RWKV_WKV7, (r, w, k, v, a, b, state), {})


def _gdn_shape(srcs: Srcs, params: Params) -> Ne:
    q, k, v, g, beta, state = (src(srcs, i) for i in range(6))
    check_rows(srcs, _GDN[:-1])
    check_state(state, "state")
    s, n_head, n_tokens, n_seqs = v.ne
    for role, x in (("q", q), ("k", k)):
        fits = (x.ne[0], x.ne[2]) == (s, n_tokens) and n_head % x.ne[1] == 0 and n_seqs % x.ne[3] == 0
        rule(fits, f"{role} must have v's ne {list(v.ne)}, or divisors of its heads and sequences; not {list(x.ne)}")
    rule(g.ne[0] in (1, s) and g.ne[1:] == v.ne[1:], f"g must have ne [1 or {s}, {n_head}, {n_tokens}, {n_seqs}]")
    rule(beta.ne == (1, *v.ne[1:]), f"beta must have ne [1, {n_head}, {n_tokens}, {n_seqs}]")
    rule(state.ne == (s, s, n_head, n_seqs), f"state must have ne [{s}, {s}, {n_head}, {n_seqs}]")
    return (s * n_head, n_tokens * n_seqs + n_slots(params) * s * n_seqs, 1, 1)


def _gdn_ref(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array, K: int) -> Array:
    n_seqs, n_tokens, n_head, n = v.shape
    q, k = (np.tile(np.repeat(x, n_seqs // x.shape[0], 0), (1, 1, n_head // x.shape[2], 1)) for x in (q, k))

    def step(s: Array, t: int) -> tuple[Array, Array]:  # [n_seqs, n_head, value, key]
        s = s * np.exp(g[:, t])[:, :, None, :]
        new = (v[:, t] - np.einsum("nhji,nhi->nhj", s, k[:, t])) * beta[:, t]
        s = s + _outer(new, k[:, t])
        return np.einsum("nhji,nhi->nhj", s, q[:, t]) / np.sqrt(n), s

    return run(step, state, n_tokens, K)


GATED_DELTA_NET = _define("gated_delta_net", _GDN, ("K",), _gdn_shape, _gdn_ref)


def gated_delta_net(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, K: int = 1) -> Tensor:
    """The gated delta rule (ggml_gated_delta_net; arXiv 2412.06464). Per head and token, with s[value, key]: first s
    decays by exp(g). Then the value that it has under the key moves by beta towards v: s = s + beta * (v - s k) k^T.
    Last it is read: y = s q / sqrt(S).

    v: F32, ne [S, n_head, n_tokens, n_seqs]. q, k: the same, or with divisors of n_head (all heads are repeated in
    turn) and of n_seqs (each sequence is repeated). g: ne [1, ...] or, for a decay per key (arXiv 2510.26692), [S,
    ...], the rest as v; beta: ne [1, ...], the rest as v. Rows dense. state: F32, ne [S, S, n_head, n_seqs],
    contiguous, keys side by side. Result: F32, ne [S * n_head, n_tokens * n_seqs + K * S * n_seqs]: y [S, n_head,
    n_tokens, n_seqs], then K times states, laid out as `state`: after the last token, after the one before it, and so
    on (zeros when tokens run out). Use views. Raises ShapeError, DTypeError.
    """
    return record(GATED_DELTA_NET, (q, k, v, g, beta, state), {"K": K})
