"""MiMo-V2 (Xiaomi, arXiv 2601.02780): llama with a window and attention sinks in most layers. Layers with the window
have heads of other sizes. The mixture of experts is routed by a sigmoid with a bias. The output of attention is
scaled."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_ffn, build_moe_ffn
from .decoder import PlainDecoder
from .hparams import HParams, Router
from .metadata import Reader, read_hparams, read_router, read_window


@dataclass(frozen=True, kw_only=True)
class MiMo2HParams(HParams):
    """f_attn_value_scale: the factor of the output of attention; 0: no factor."""

    f_attn_value_scale: float


class MiMo2(PlainDecoder[MiMo2HParams]):
    """A plain decoder with a scaled output of attention, and with experts in the layers that have a router."""

    def attention(self, b: Build[MiMo2HParams], cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        """The output of attention in layer `il`, whose input is `cur`."""
        hp, cur = b.hparams, super().attention(b, cur, pos, factors, il)
        scale = hp.f_attn_value_scale
        return b.cb(gg.scale(cur, scale), "attn_out_scaled", il) if scale else cur

    def ffn(self, b: Build, cur: Tensor, il: int) -> Tensor:
        """The feed-forward network, or the mixture of experts when layer `il` has a router. Beside a router, a file may
        have a network that nothing reads."""
        n_embd, n_ff = cur.ne[0], b.hparams.layer(il).n_ff
        if b.optional("ffn_gate_inp", (n_embd, b.hparams.n_expert), il) is None:
            return build_ffn(b, cur, il)
        for role, ne in (("ffn_gate", (n_embd, n_ff)), ("ffn_up", (n_embd, n_ff)), ("ffn_down", (n_ff, n_embd))):
            b.optional(role, ne, il)
        return build_moe_ffn(b, cur, il)


def _read(r: Reader) -> MiMo2HParams:
    return read_hparams(
        MiMo2HParams,
        r,
        rope_type="neox",
        router=read_router(r, Router(gating="sigmoid")),
        f_attn_value_scale=r.number("{arch}.attention.value_scale", 0.0),
        **read_window(r, 0, plain_rope=True),
    )


ARCHITECTURES = (
    Architecture(("mimo2",), MiMo2(sinks="some", biases="none", hidden_normed=False).build, _read, nextn=True),
)
