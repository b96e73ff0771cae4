"""GroveMoE (arXiv:2508.07785): Qwen3's mixture, and small adjugate experts that groups of its experts share.

Which adjugate experts a token goes to follows from its experts. As llama.cpp has it, they read what the experts gave
and weigh by the router's probabilities under their own numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_expert_weights, build_experts, build_router
from .decoder import PlainDecoder
from .hparams import HParams
from .metadata import Reader, read_hparams


@dataclass(frozen=True, kw_only=True)
class GroveHParams(HParams):
    """Hyperparameters of the adjugate experts, in this order: how many experts share one, its size, and the factor of
    its output."""

    n_group_experts: int
    n_ff_chexp: int  # 0: n_embd_head_k
    f_expert_group_scale: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.n_group_experts or self.n_expert % self.n_group_experts:
            raise ModelError(f"the {self.n_expert} experts make no groups of experts_per_group {self.n_group_experts}")


class GroveDecoder(PlainDecoder[GroveHParams]):
    """Decoders with adjugate experts."""

    def ffn(self, b: Build[GroveHParams], cur: Tensor, il: int) -> Tensor:
        """The experts, and what the adjugate experts add."""
        hp = b.hparams
        size, n_chexp = hp.n_group_experts, hp.n_expert // hp.n_group_experts
        logits = b.linear("ffn_gate_inp", cur, hp.n_expert, "ffn_moe_logits", il)
        selected, weights = build_router(b, cur, il, logits=logits)
        out = build_experts(b, cur, selected, weights, hp.layer(il).n_ff_exp, il)
        probs = b.cb(gg.soft_max(logits), "ffn_adj_moe_probs", il)
        chosen = gg.top_k(probs, min(hp.n_expert_used, n_chexp))
        if size > 1:  # their numbers divided, rounded down
            halfway = gg.scale_bias(gg.cast(chosen, DType.F32), 1.0 / size, 0.25 / size)
            chosen = b.cb(gg.cast(gg.floor(halfway), DType.I32), "ffn_adj_moe_topk", il)
        weights = build_expert_weights(b, probs, chosen, il)
        n_ff = hp.n_ff_chexp or hp.n_embd_head_k
        adjugate = build_experts(b, out, chosen, weights, n_ff, il, kind="_chexps", n_expert=n_chexp)
        adjugate = b.cb(gg.scale(adjugate, hp.f_expert_group_scale), "ffn_adj_moe_scaled", il)
        return b.cb(gg.add(out, adjugate), "ffn_final_moe_out", il)


def _read(r: Reader) -> GroveHParams:
    return read_hparams(
        GroveHParams,
        r,
        rope_type="neox",
        n_group_experts=r.integer(Keys.LLM.EXPERTS_PER_GROUP),
        n_ff_chexp=r.integer(Keys.LLM.EXPERT_CHUNK_FEED_FORWARD_LENGTH, 0),
        f_expert_group_scale=r.number(Keys.LLM.EXPERT_GROUP_SCALE),
    )


ARCHITECTURES = (Architecture(("grovemoe",), GroveDecoder(qk_norm="head").build, _read),)
