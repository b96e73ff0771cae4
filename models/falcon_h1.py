"""Falcon-H1 (arXiv 2507.22448): in every layer, attention and Mamba-2 side by side."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, llm_build_kv
from .blocks.ssm import build_mamba2
from .decoder import PlainDecoder
from .hparams import StateShape
from .mamba import MambaHParams, read_ssm
from .metadata import Reader, read_hparams


@dataclass(frozen=True, kw_only=True)
class _FalconHParams(MambaHParams):
    def state(self, il: int) -> StateShape:
        return self.ssm.state


@dataclass(frozen=True, kw_only=True)
class FalconH1(PlainDecoder[MambaHParams]):
    """A plain decoder in which attention and Mamba-2 read the same input, and their outputs are added."""

    def attention(self, b: Build[MambaHParams], cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        hp = b.hparams
        attn = llm_build_kv(b, self.kv(b, cur, pos, factors, il), bias=False)
        ssm = build_mamba2(b, cur, hp.ssm, il, norm="optional")
        return b.cb(gg.add(attn, ssm), "layer_out", il)


def _read(r: Reader) -> _FalconHParams:
    return read_hparams(_FalconHParams, r, ssm=read_ssm(r), rope_type="neox")


ARCHITECTURES = (
    Architecture(("falcon-h1",), FalconH1(rope_factors=False, bare_norms=("ffn_norm",)).build, _read, "hybrid"),
)
