"""Feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from pyggml import ops as gg
from pyggml.tensor import Tensor

from .build import Build

Activation = Literal["silu", "gelu", "gelu_erf", "relu", "relu_sqr", "tanh"]

Glu = Callable[[Tensor, Tensor | None], Tensor]  # of gate and up, or of both in the halves of each row

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": gg.silu,
    "gelu": gg.gelu,
    "gelu_erf": gg.gelu_erf,
    "relu": gg.relu,
    "relu_sqr": lambda a: gg.sqr(gg.relu(a)),
    "tanh": gg.tanh,
}
HALVES: dict[Activation, Callable[[Tensor], Tensor]] = {  # of the first half of each row, times the second
    "silu": gg.swiglu,
    "gelu": gg.geglu,
    "gelu_erf": gg.geglu_erf,
    "relu": gg.reglu,
}


def limited(limit: float) -> Activation | Glu:
    """silu(gate) * up, of gate and up within `limit`; 0: there is none."""
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

    `n_ff`: that of the layer, unless given. `kind` ends the roles of its weights: `_shexp`, the experts that all share.
    `bias`: as for `Build.linear`. `gate_in_up`: `ffn_up` gives the gate, and then what it lets through.
    Without a gate, what `act` gives is divided by `ffn.act.scales` where the model has them.
    """
    n_ff = n_ff or b.hparams.layer(il).n_ff
    if gate_in_up:
        up = b.linear(f"ffn_up{kind}", cur, 2 * n_ff, "ffn_up", il, bias=bias)
        assert not callable(act), act
        par = b.cb(HALVES[act](up), "ffn_swiglu" if act == "silu" else f"ffn_{act}_glu", il)
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
