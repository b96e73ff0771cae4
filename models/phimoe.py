"""Phi-3.5-MoE (arXiv:2404.14219): as in llama.cpp, or as its authors have it when the file says so.

The authors have layer norms; llama.cpp's norms do not subtract the mean. The authors have a sparse mixer as router
(arXiv:2409.12136): the weight of an expert is a softmax over the experts that are not chosen yet and whose logits are
close to its own. llama.cpp has Mixtral's router. Files that mean the authors' model have two keys which only pyggml
writes: `attention.layer_norm_epsilon`, and `expert_router_jitter`, which says what is close.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_experts, build_moe_ffn
from .decoder import PlainDecoder
from .hparams import HParams
from .metadata import Reader, read_hparams, read_own_pattern, read_own_window

_JITTER_KEY = "{arch}.expert_router_jitter"
_FAR = -1e30  # added to a logit, it leaves nothing of its share


@dataclass(frozen=True, kw_only=True)
class PhiMoEHParams(HParams):
    """Hyperparameters of Phi-3.5-MoE.

    layer_norm     norms subtract the mean
    router_jitter  how far apart close logits of the router may be, as a part of the larger; 0: no sparse mixer
    """

    layer_norm: bool
    router_jitter: float


class PhiMoE(PlainDecoder[PhiMoEHParams]):
    """A plain decoder with a sparse mixer as router."""

    def ffn(self, b: Build[PhiMoEHParams], cur: Tensor, il: int) -> Tensor:
        """The mixture of experts of layer `il`."""
        hp = b.hparams
        if not hp.router_jitter:
            return build_moe_ffn(b, cur, il)
        logits = b.linear("ffn_gate_inp", cur, hp.n_expert, "ffn_moe_logits", il)
        selected, weights = _sparse_mixer(b, logits, hp, il)
        return build_experts(b, cur, selected, weights, hp.layer(il).n_ff_exp, il)


def _sparse_mixer(b: Build, logits: Tensor, hp: PhiMoEHParams, il: int) -> tuple[Tensor, Tensor]:
    """The experts chosen, I32 ne [n_used, n_tokens], and how much each counts, ne [1, n_used, n_tokens]."""
    n_expert, n_tokens = logits.ne[:2]
    selected = b.cb(gg.top_k(logits, hp.n_expert_used), "ffn_moe_topk", il)
    values = gg.get_rows(gg.reshape_3d(logits, 1, n_expert, n_tokens), selected)  # [1, n_used, n_tokens]
    left, weights = logits, None
    for i in range(hp.n_expert_used):
        best = gg.cont(gg.view_2d(values, 1, n_tokens, values.nb[2], i * values.nb[1]))  # [1, n_tokens]
        below = gg.neg(gg.sub(logits, best))
        larger = gg.add(gg.relu(gg.sub(gg.abs(logits), best)), best)  # the larger of |logit| and the best one
        far = gg.step(gg.sub(below, gg.scale(larger, 2 * hp.router_jitter)))
        share = gg.soft_max(gg.add(left, gg.scale(far, _FAR)))  # [n_expert, n_tokens]
        shares = gg.get_rows(gg.reshape_3d(share, 1, n_expert, n_tokens), selected)
        weight = gg.cont(gg.view_3d(shares, 1, 1, n_tokens, shares.nb[1], shares.nb[2], i * shares.nb[1]))
        weights = weight if weights is None else gg.concat(weights, weight, 1)
        left = gg.add(logits, gg.scale_bias(gg.step(below), -_FAR, _FAR))  # those chosen are the largest
    assert weights is not None
    return selected, b.cb(weights, "ffn_moe_weights", il)


def _build(b: Build[PhiMoEHParams]) -> Graph:
    return PhiMoE(norm="layer" if b.hparams.layer_norm else "rms").build(b)


def _read(r: Reader) -> PhiMoEHParams:
    eps = r.number(Keys.Attention.LAYERNORM_EPS, 0.0)
    return read_hparams(
        PhiMoEHParams,
        r,
        rope_type="neox",
        layer_norm=eps > 0,
        f_norm_eps=eps,
        router_jitter=r.number(_JITTER_KEY, 0.0),
        n_swa=read_own_window(r),
        swa_pattern=read_own_pattern(r),
    )


ARCHITECTURES = (Architecture(("phimoe",), _build, _read),)
