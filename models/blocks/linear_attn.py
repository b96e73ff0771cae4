"""Linear attention: heads that keep a matrix of keys and values, and its gates."""

from __future__ import annotations

from pyggml import ops as gg
from pyggml.tensor import Tensor

from .build import Build
from .states import read_state, store_state, tokens_by_sequence


def l2_norm(cur: Tensor, eps: float) -> Tensor:
    """Each row divided by the root of its sum of squares plus `eps`."""
    n = cur.ne[0]
    return gg.scale(gg.rms_norm(cur, eps / n), n**-0.5)


def build_delta_net(b: Build, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, il: int) -> Tensor:
    """The gated delta rule (see `gated_delta_net`) over the ubatch's tokens, from the states of its sequences, which
    are stored: ne [S, n_head, n_tokens].

    v has ne [S, n_head, n_tokens]. q and k have the same, or fewer heads, a divisor of n_head, which are repeated as a
    whole. g, ne [1 or S, n_head, n_tokens]: the logarithm of what the state fades by. beta: ne [1, n_head, n_tokens].
    """
    s, n_head, n_tokens, _ = v.ne
    states = b.states.s_l[il]
    before = gg.reshape_4d(read_state(b, states, "state_predelta", il), s, s, n_head, b.n_seqs)
    q, k, v, g, beta = (tokens_by_sequence(b, t) for t in (q, k, v, g, beta))
    out = b.cb(gg.gated_delta_net(q, k, v, g, beta, before), "delta_net", il)
    return _results(b, out, s, n_head, n_tokens, il)


def build_linear_attn(b: Build, q: Tensor, k: Tensor, v: Tensor, g: Tensor, il: int) -> Tensor:
    """Linear attention that fades by `g` (see `gated_linear_attn`), over the ubatch's tokens, from the states of its
    sequences, which are stored. All of ne [S, n_head, n_tokens], as is the result."""
    s, n_head, n_tokens, _ = v.ne
    before = read_state(b, b.states.s_l[il], "state_before", il)
    out = b.cb(gg.gated_linear_attn(k, v, q, g, before, 1.0), "linear_attn", il)
    return _results(b, out, s, n_head, n_tokens, il)


def _results(b: Build, out: Tensor, s: int, n_head: int, n_tokens: int, il: int) -> Tensor:
    """Store the states that `out` ends with, and return the rest, what tokens read: ne [S, n_head, n_tokens]."""
    size, n = out.nb[0], s * n_head
    last = gg.view_2d(out, s * n, b.n_seqs, size * s * n, size * n * n_tokens)
    store_state(b, b.states.s_l[il], last, "state_updated", il)
    return gg.view_3d(out, s, n_head, n_tokens, size * s, size * n, 0)
