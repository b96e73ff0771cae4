"""State-space layers: Mamba (arXiv 2312.00752) and Mamba-2 (arXiv 2405.21060)."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from pyggml import ops as gg
from pyggml.tensor import Tensor

from ..hparams import StateShape
from .build import Build
from .norm import build_norm
from .states import as_f32, build_conv, build_inp_s_read, parts_of_rows, store_state, tokens_by_sequence


class SSM(NamedTuple):
    """The sizes of a state-space layer."""

    d_conv: int  # tokens that the convolution sees
    d_inner: int
    d_state: int
    dt_rank: int  # Mamba-2: heads
    n_group: int = 0  # Mamba-2: heads of a group share B and C
    dt_min: float = 0.0  # Mamba-2: the shortest time step

    @property
    def state(self) -> StateShape:
        """What such a layer remembers of a sequence."""
        channels = self.d_inner + 2 * self.n_group * self.d_state
        return StateShape((self.d_conv - 1) * channels, self.d_state * self.d_inner)


def build_mamba(
    b: Build,
    cur: Tensor,
    m: SSM,
    il: int,
    *,
    dt_b_c_norm: Literal["none", "plain", "weighted"] = "none",
    eps: float = 0.0,
) -> Tensor:
    """Mamba: ne [n_embd, n_tokens]. `dt_b_c_norm`: dt, B and C are normed (plain: without weights); `eps` of these."""
    n_embd, d_inner, d_state = cur.ne[0], m.d_inner, m.d_state
    xz = b.linear("ssm_in", cur, 2 * d_inner, "ssm_in", il)
    x, z = _columns(b, xz, 0, d_inner), _columns(b, xz, d_inner, d_inner)
    x = b.cb(gg.silu(build_conv(b, x, "ssm_conv1d", m.d_conv, il)), "ssm_conv_silu", il)
    x_db = b.cb(b.mul_mat(b.weight("ssm_x", (d_inner, m.dt_rank + 2 * d_state), il), x), "ssm_x", il)
    parts = (("dt", 0, m.dt_rank), ("b", m.dt_rank, d_state), ("c", m.dt_rank + d_state, d_state))

    def part(name: str, first: int, n: int) -> Tensor:
        cur = _columns(b, x_db, first, n)
        if dt_b_c_norm == "none":
            return gg.cont(cur) if name == "dt" else cur
        role = f"ssm_{name}_norm" if dt_b_c_norm == "weighted" else ""
        return build_norm(b, cur, role, f"ssm_{name}_normed", il, eps=eps)

    dt, B, C = (part(*p) for p in parts)
    dt = b.linear("ssm_dt", dt, d_inner, "ssm_dt", il)
    A = b.weight("ssm_a", (d_state, d_inner), il, "")
    channels = gg.reshape_3d(x, 1, d_inner, b.n_tokens)
    b_rows, c_rows = (parts_of_rows(t, 0, 1, d_state) for t in (B, C))
    y = build_scan(b, channels, dt, A, b_rows, c_rows, il)
    y = gg.reshape_2d(y, d_inner, b.n_tokens)
    y = b.cb(gg.add(y, gg.mul(x, b.weight("ssm_d", (d_inner,), il, ""))), "ssm_y", il)
    y = b.cb(gg.swiglu_split(z, y), "ssm_gated", il)
    return b.linear("ssm_out", y, n_embd, "ssm_out", il)


def build_mamba2(b: Build, cur: Tensor, m: SSM, il: int, *, norm: Literal["weight", "optional"] = "weight") -> Tensor:
    """A layer of Mamba-2: ne [n_embd, n_tokens]. `norm`: whether a model must have a norm for the gated output."""
    n_embd, d_inner, n_bc, n_head, n_tokens = cur.ne[0], m.d_inner, m.n_group * m.d_state, m.dt_rank, b.n_tokens
    zxBCdt = b.linear("ssm_in", cur, 2 * d_inner + 2 * n_bc + n_head, "ssm_in", il)
    z = _columns(b, zxBCdt, 0, d_inner)
    xBC = _columns(b, zxBCdt, d_inner, d_inner + 2 * n_bc)
    dt = _columns(b, zxBCdt, 2 * d_inner + 2 * n_bc, n_head)
    xBC = b.cb(gg.silu(build_conv(b, xBC, "ssm_conv1d", m.d_conv, il)), "ssm_conv_silu", il)
    x = parts_of_rows(xBC, 0, n_head, d_inner // n_head)
    B, C = (parts_of_rows(xBC, first, m.n_group, m.d_state) for first in (d_inner, d_inner + n_bc))
    dt = b.cb(gg.add(dt, b.weight("ssm_dt", (n_head,), il, "bias")), "ssm_dt", il)
    if m.dt_min:  # the limit is for softplus(dt), which the scan computes
        dt = b.cb(gg.clamp(dt, math.log(math.expm1(m.dt_min)), math.inf), "ssm_dt_clamped", il)
    y = build_scan(b, x, dt, b.weight("ssm_a", (1, n_head), il, ""), B, C, il)
    y = b.cb(gg.add(y, gg.mul(x, b.weight("ssm_d", (1, n_head), il, ""))), "mamba2_y_add_d", il)
    y = b.cb(gg.swiglu_split(z, gg.reshape_2d(y, d_inner, n_tokens)), "ssm_gated", il)
    ne = (d_inner // m.n_group, m.n_group)
    if norm == "weight" or b.optional("ssm_norm", ne, il) is not None:
        y = build_norm(b, gg.reshape_3d(y, *ne, n_tokens), "ssm_norm", "ssm_normed", il, per_head=True)
    return b.linear("ssm_out", gg.reshape_2d(y, d_inner, n_tokens), n_embd, "mamba_out", il)


def build_scan(b: Build, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, il: int) -> Tensor:
    """The selective scan over the ubatch's tokens, from the states of its sequences, which are stored: ne as `x`.

    x: ne [head_dim, n_head, n_tokens], dt [n_head, n_tokens], A [1 or d_state, n_head], B and C
    [d_state, n_group, n_tokens].
    """
    (head_dim, n_head, _, _), d_state, states = x.ne, B.ne[0], b.states
    cells = gg.reshape_4d(states.s_l[il], d_state, head_dim, n_head, states.n_cells)
    dt = gg.reshape_3d(dt, n_head, b.n_seq_tokens, b.n_seqs)
    x, sB, sC = (tokens_by_sequence(b, t) for t in (x, B, C))
    out = b.cb(gg.ssm_scan(cells, x, dt, as_f32(A), sB, sC, build_inp_s_read(b)), "ssm_scan", il)
    size = out.nb[0]
    state = d_state * head_dim * n_head
    last = gg.view_2d(out, state, b.n_seqs, size * state, size * head_dim * n_head * b.n_tokens)
    store_state(b, states.s_l[il], last, "ssm_states_updated", il)
    return gg.view_3d(out, head_dim, n_head, b.n_tokens, size * head_dim, size * head_dim * n_head, 0)


def _columns(b: Build, t: Tensor, first: int, n: int) -> Tensor:
    """Elements `first` .. `first + n` of each row: ne [n, n_tokens]."""
    return gg.view_2d(t, n, b.n_tokens, t.nb[1], first * t.nb[0])
