"""Jamba (arXiv 2403.19887): Mamba layers, some that attend (without positions), and mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_ffn, build_moe_ffn
from .blocks.ssm import build_mamba
from .decoder import PlainDecoder
from .hparams import Router
from .mamba import MambaHParams, read_ssm
from .metadata import Reader, read_hparams, read_router


@dataclass(frozen=True, kw_only=True)
class Jamba(PlainDecoder[MambaHParams]):
    """A decoder in which layers without heads have Mamba instead of attention."""

    def attention(self, b: Build[MambaHParams], cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        hp = b.hparams
        if hp.has_kv(il):
            return super().attention(b, cur, pos, factors, il)
        return build_mamba(b, cur, hp.ssm, il, dt_b_c_norm="weighted")

    def ffn(self, b: Build, cur: Tensor, il: int) -> Tensor:
        """A mixture of experts in layers that have a router."""
        n_expert = b.hparams.n_expert
        if n_expert and b.optional("ffn_gate_inp", (cur.ne[0], n_expert), il) is not None:
            return build_moe_ffn(b, cur, il)
        return build_ffn(b, cur, il)


def _read(r: Reader) -> MambaHParams:
    return read_hparams(MambaHParams, r, ssm=read_ssm(r), rope_layers=0, router=read_router(r, Router(norm=False)))


ARCHITECTURES = (Architecture(("jamba",), Jamba(rope_factors=False).build, _read, "hybrid"),)
