"""Mixtures of experts."""

from __future__ import annotations

import math
from collections.abc import Callable

from pyggml import ops as gg
from pyggml.tensor import Tensor

from ..hparams import Gating
from .build import Build
from .ffn import ACTIVATIONS, Activation, Glu, act_of, build_ffn, of_halves

_GATING: dict[Gating, Callable[[Tensor], Tensor]] = {
    "softmax": gg.soft_max,
    "sigmoid": gg.sigmoid,
    "sqrt_softplus": lambda logits: gg.sqrt(gg.softplus(logits)),
}
_MIN_SUM = 2.0**-14  # the smallest normal number of F16, as llama.cpp has it


def build_moe_ffn(b: Build, cur: Tensor, il: int, act: Activation | Glu = "silu", *, gated: bool = True) -> Tensor:
    """The experts that the router picks for each token, weighted and summed: ne [n_embd, n_tokens]."""
    selected, weights = build_router(b, cur, il)
    return build_experts(b, cur, selected, weights, b.hparams.layer(il).n_ff_exp, il, act, gated=gated)


def build_shared_expert(
    b: Build, cur: Tensor, il: int, act: Activation | Glu = "silu", *, gated: bool = False
) -> Tensor:
    """The expert that all tokens share: ne [n_embd, n_tokens]. `gated`: its output is multiplied with the sigmoid of
    another product of `cur`."""
    out = build_ffn(b, cur, il, act, n_ff=b.hparams.n_ff_shexp, kind="_shexp")
    if not gated:
        return b.cb(out, "ffn_shexp", il)
    gate = b.cb(b.mul_mat(b.weight("ffn_gate_inp_shexp", (cur.ne[0],), il), cur), "shared_expert_gate", il)
    gate = b.cb(gg.sigmoid(gate), "shared_expert_gate_sigmoid", il)  # [1, n_tokens]
    return b.cb(gg.mul(out, gate), "ffn_shexp_gated", il)


def build_moe_or_ffn(
    b: Build, cur: Tensor, il: int, act: Activation | Glu = "silu", shared_act: Activation | Glu = "silu"
) -> Tensor:
    """The network of layer `il`, ne [n_embd, n_tokens]. In layers with a mixture: the experts, whose activation is
    `act`, plus the expert that all tokens share. In the other layers: a plain network. The shared expert and the plain
    network have the activation `shared_act`."""
    if not b.hparams.is_moe(il):
        return build_ffn(b, cur, il, shared_act)
    out = build_moe_ffn(b, cur, il, act)
    return b.cb(gg.add(out, build_shared_expert(b, cur, il, shared_act)), "ffn_out", il)


def build_router(
    b: Build, cur: Tensor, il: int, *, logits: Tensor | None = None, bias_role: str = "exp_probs_b"
) -> tuple[Tensor, Tensor]:
    """Which experts each token goes to, I32 ne [n_used, n_tokens], and how much each counts, ne [1, n_used, n_tokens].

    `logits`: the router's logits, ne [n_expert, n_tokens], when they are not simply a product with `cur`.
    A model may have a bias of the role `bias_role`. It is added when experts are chosen, and does not change how much
    they count.
    """
    rule, n_expert = b.hparams.router, b.hparams.n_expert
    if logits is None:
        logits = b.linear("ffn_gate_inp", cur, n_expert, "ffn_moe_logits", il)
    probs = router_probs(b, logits, il)
    by = probs  # [n_expert, n_tokens]
    for suffix in ("bias", ""):  # in files of some architectures the name has no suffix
        bias = b.optional(bias_role, (n_expert,), il, suffix)
        if bias is not None:
            by = b.cb(gg.add(probs, bias), "ffn_moe_probs_biased", il)
    if rule.n_group > 1:
        by = _best_groups(b, by, il)
    selected = b.cb(gg.top_k(by, b.hparams.n_expert_used), "ffn_moe_topk", il)
    return selected, build_expert_weights(b, probs, selected, il, best=by is probs)


def router_probs(b: Build, logits: Tensor, il: int) -> Tensor:
    """The probabilities that experts are chosen by, before any bias: ne as `logits`."""
    rule = b.hparams.router
    return logits if rule.of_selected else b.cb(_GATING[rule.gating](logits), "ffn_moe_probs", il)


def build_expert_weights(b: Build, probs: Tensor, selected: Tensor, il: int, best: bool = False) -> Tensor:
    """How much each of the selected experts counts, ne [1, n_used, n_tokens], by the router's rules; `probs`, ne
    [n_expert, n_tokens], of all of them. `best`: those with the largest of `probs` were selected."""
    rule, n_expert, n_used, n_tokens = b.hparams.router, probs.ne[0], selected.ne[0], probs.ne[1]
    weights = b.cb(gg.get_rows(gg.reshape_3d(probs, 1, n_expert, n_tokens), selected), "ffn_moe_weights", il)
    if rule.of_selected or rule.norm:
        weights = gg.reshape_2d(weights, n_used, n_tokens)
    if rule.of_selected:
        weights = b.cb(_GATING[rule.gating](weights), f"ffn_moe_weights_{rule.gating}", il)
    if rule.norm:
        weights_sum = b.cb(gg.sum_rows(weights), "ffn_moe_weights_sum", il)  # [1, n_tokens]
        if not (rule.gating == "softmax" and (best or rule.of_selected)):  # whose sum is at least n_used / n_expert
            weights_sum = b.cb(gg.clamp(weights_sum, _MIN_SUM, math.inf), "ffn_moe_weights_sum_clamped", il)
        weights = b.cb(gg.div(weights, weights_sum), "ffn_moe_weights_norm", il)
    if rule.scale:
        weights = b.cb(gg.scale(weights, rule.scale), "ffn_moe_weights_scaled", il)
    return gg.reshape_3d(weights, 1, n_used, n_tokens)


def _best_groups(b: Build, by: Tensor, il: int) -> Tensor:
    """`by`, ne [n_expert, n_tokens], with -inf for the experts outside of the best groups."""
    n_expert, n_tokens = by.ne[0], by.ne[1]
    n_group, n_group_used = b.hparams.router.n_group, b.hparams.router.n_group_used
    size = n_expert // n_group
    rows = gg.reshape_2d(by, size, n_group * n_tokens)
    best = gg.get_rows(gg.reshape_3d(rows, 1, size, rows.ne[1]), gg.top_k(rows, 2))  # [1, 2, n_group * n_tokens]
    scores = gg.reshape_2d(gg.sum_rows(gg.reshape_2d(best, 2, rows.ne[1])), n_group, n_tokens)
    groups = b.cb(gg.top_k(scores, n_group_used), "ffn_moe_group_topk", il)
    by = gg.reshape_3d(by, size, n_group, n_tokens)
    masked = gg.set_rows(gg.fill(by, -math.inf), gg.get_rows(by, groups), groups)
    return b.cb(gg.reshape_2d(masked, n_expert, n_tokens), "ffn_moe_probs_masked", il)


def build_experts(
    b: Build,
    cur: Tensor,
    selected: Tensor,
    weights: Tensor,
    n_ff: int,
    il: int,
    act: Activation | Glu = "silu",
    *,
    gated: bool = True,
    weights_first: bool = False,
    kind: str = "_exps",
    n_expert: int = 0,
) -> Tensor:
    """down(act(gate(cur)) * up(cur)) of the selected experts, times their weights, summed: ne as `cur`.

    act            the activation of the gate, or a function of gate and up together
    gated          false: there is no gate, and an expert is down(act(up(cur)))
    weights_first  the weights multiply the input of the experts, not their output
    kind           the end of the roles of the experts' weights
    n_expert       how many experts there are, when the router also knows experts of another kind
    A model may have `gate` and `up` in one weight, biases, and a scale for each expert.
    """
    n_embd, n_tokens, act = cur.ne[0], cur.ne[1], act_of(b, act)
    n_expert, n_used = n_expert or b.hparams.n_expert, selected.ne[0]

    def linear(part: str, cur: Tensor, n_out: int) -> Tensor:  # ne [n_out, n_used, n_tokens]
        role = f"ffn_{part}{kind}"
        w = b.weight(role, (cur.ne[0], n_out, n_expert), il)
        out = b.cb(gg.mul_mat_id(w, cur, selected), f"ffn_moe_{part}", il)
        scale = b.optional(role, (n_expert,), il, "scale")
        if scale is not None:
            ids = gg.reshape_1d(selected, n_used * n_tokens)
            each = gg.reshape_3d(gg.get_rows(gg.reshape_2d(scale, 1, n_expert), ids), 1, n_used, n_tokens)
            out = b.cb(gg.mul(out, each), f"ffn_moe_{part}_scaled", il)
        out = b.adapters.product(out, w.name, cur, selected)
        bias = b.optional(role, (n_out, n_expert), il, "bias")
        return out if bias is None else b.cb(gg.add_id(out, bias, selected), f"ffn_moe_{part}_biased", il)

    cur = gg.reshape_3d(cur, n_embd, 1, n_tokens)
    if weights_first:
        cur = b.cb(gg.mul(gg.repeat_4d(cur, n_embd, n_used, n_tokens, 1), weights), "ffn_moe_weighted", il)
    if not gated:
        assert not callable(act), act
        par = b.cb(ACTIVATIONS[act](linear("up", cur, n_ff)), f"ffn_moe_{act}", il)
    elif b.optional(f"ffn_gate_up{kind}", (n_embd, 2 * n_ff, n_expert), il) is not None:
        both = linear("gate_up", cur, 2 * n_ff)
        par = b.cb(of_halves(act, both), "ffn_moe_gate_par", il)
    else:
        gate = linear("gate", cur, n_ff)
        if callable(act):
            par = act(gate, linear("up", cur, n_ff))
        else:
            gate = b.cb(ACTIVATIONS[act](gate), f"ffn_moe_{act}", il)
            par = gg.mul(linear("up", cur, n_ff), gate)
        b.cb(par, "ffn_moe_gate_par", il)
    out = linear("down", par, n_embd)
    if not weights_first:
        out = b.cb(gg.mul(out, weights), "ffn_moe_weighted", il)

    views = [gg.view_2d(out, n_embd, n_tokens, out.nb[2], i * out.nb[1]) for i in range(n_used)]
    total = views[0]
    for view in views[1:]:
        total = gg.add(total, view)
    return b.cb(total if n_used > 1 else gg.cont(total), "ffn_moe_out", il)
