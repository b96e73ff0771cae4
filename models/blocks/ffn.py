"""Feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pyggml import ops as gg
from pyggml.tensor import Tensor

from ..hparams import Activation
from .build import Build

Glu = Callable[[Tensor, Tensor | None], Tensor]  # takes gate and up, or one tensor whose rows are gate, then up

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": gg.silu,
    "gelu": gg.gelu,
    "gelu_erf": gg.gelu_erf,
    "gelu_quick": gg.gelu_quick,
    "relu": gg.relu,
    "relu_sqr": lambda a: gg.sqr(gg.relu(a)),
    "tanh": gg.tanh,
    "sigmoid": gg.sigmoid,
}
_HALVES: dict[Activation, Callable[[Tensor], Tensor]] = {  # activation(first half of each row) * second half
    "silu": gg.swiglu,
    "gelu": gg.geglu,
    "gelu_erf": gg.geglu_erf,
    "gelu_quick": gg.geglu_quick,
    "relu": gg.reglu,
}


def act_of(b: Build, act: Activation | Glu) -> Activation | Glu:
    """The activation of a network: the one that the file names, or otherwise the builder's `act`. When `act` is a
    function of gate and up, it is used in any case."""
    return act if callable(act) else b.hparams.act or act


def of_halves(act: Activation | Glu, both: Tensor) -> Tensor:
    """`act` of the first half of each row of `both`, times the second half: ne [both.ne[0] / 2, ...]."""
    if callable(act):
        return act(both, None)
    if act in _HALVES:
        return _HALVES[act](both)
    n, (_, *ne, _), nb = both.ne[0] // 2, both.ne, both.nb
    gate, up = (gg.cont(gg.view_3d(both, n, ne[0], ne[1], nb[1], nb[2], i * n * nb[0])) for i in (0, 1))
    return gg.mul(ACTIVATIONS[act](gate), up)


def limited(limit: float) -> Activation | Glu:
    """silu(gate) * up, with gate and up kept within `limit`; 0: without a limit."""
    return partial(gg.swiglu_clamp, limit=limit) if limit else "silu"


def build_ffn(
    b: Build,
    cur: Tensor,
    il: int,
    act: Activation | Glu = "silu",
    gated: bool = True,
    *,
    n_ff: int = 0,
    kind: str = "",
    bias: bool = True,
    gate_in_up: bool = False,
) -> Tensor:
    """down(act(gate(cur)) * up(cur)), or without a gate down(act(up(cur))): ne [n_embd, n_tokens]. `act` may be a
    function of gate and up together.

    n_ff        the width of the network; by default that of the layer
    kind        the end of its weights' roles: `_shexp` for the expert that all tokens share
    bias        as for `Build.linear`
    gate_in_up  the first half of the rows of `ffn_up` is the gate

    Without a gate the output of `act` is divided by `ffn.act.scales`, when the model has them.
    """
    n_ff, act = n_ff or b.hparams.layer(il).n_ff, act_of(b, act)
    if gate_in_up:
        up = b.linear(f"ffn_up{kind}", cur, 2 * n_ff, "ffn_up", il, bias=bias)
        par = b.cb(of_halves(act, up), "ffn_swiglu" if act == "silu" else f"ffn_{act}_glu", il)
    elif gated:
        gate = b.linear(f"ffn_gate{kind}", cur, n_ff, "ffn_gate", il, bias=bias)
        if not callable(act):
            gate = b.cb(ACTIVATIONS[act](gate), f"ffn_{act}", il)
        up = b.linear(f"ffn_up{kind}", cur, n_ff, "ffn_up", il, bias=bias)
        par = b.cb(act(gate, up) if callable(act) else gg.mul(gate, up), "ffn_gate_par", il)
    else:
        assert not callable(act), act
        up = b.linear(f"ffn_up{kind}", cur, n_ff, "ffn_up", il, bias=bias)
        par = b.cb(ACTIVATIONS[act](up), f"ffn_{act}", il)
        scales = b.optional("ffn.act", (n_ff,), il, "scales")
        par = par if scales is None else b.cb(gg.div(par, scales), "ffn_act", il)
    return b.linear(f"ffn_down{kind}", par, cur.ne[0], "ffn_out", il, bias=bias)
