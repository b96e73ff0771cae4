"""Command A mixtures (Cohere, llama.cpp's `cohere2moe`): Cohere 2, whose attention and network read the same, with a
mixture of experts after the first layers. What the experts give and what the one that all tokens share gives is
averaged. All but every fourth layer have a window; those with it, and those without experts, are roped. The norms are
of the kind whose epsilon the file has."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build
from .decoder import PlainDecoder
from .hparams import HParams, NormKind, Router
from .metadata import Reader, read_hparams, read_router, read_swa_pattern, read_window


@dataclass(frozen=True, kw_only=True)
class Cohere2MoeHParams(HParams):
    """The kind of its norms."""

    norm_kind: NormKind


class Cohere2Moe(PlainDecoder):
    """The average of the experts and the shared one."""

    def ffn(self, b: Build, cur: Tensor, il: int) -> Tensor:
        """The feed-forward network, or the mixture of experts, of layer `il`."""
        cur = super().ffn(b, cur, il)
        averaged = b.hparams.is_moe(il) and b.hparams.n_ff_shexp
        return b.cb(gg.scale(cur, 0.5), "ffn_out_averaged", il) if averaged else cur


def build_cohere2moe(b: Build[Cohere2MoeHParams]) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    return Cohere2Moe(norm=b.hparams.norm_kind, parallel=True).build(b)


def _read(r: Reader) -> Cohere2MoeHParams:
    norm: NormKind = "rms" if r.number(Keys.Attention.LAYERNORM_RMS_EPS, 0.0) else "layer"
    windowed = read_swa_pattern(r, 4, dense_first=True)
    n_dense = r.integer(Keys.LLM.LEADING_DENSE_BLOCK_COUNT)
    return read_hparams(
        Cohere2MoeHParams,
        r,
        norm,
        norm_kind=norm,
        f_logit_scale=r.number(Keys.LLM.LOGIT_SCALE),
        router=read_router(r, Router(gating="sigmoid", norm=False)),
        rope_layers=tuple(
            int(swa or il < n_dense or r.layers.start > 0) for il, swa in zip(r.layers, windowed, strict=True)
        ),
        **read_window(r, 4, dense_first=True),
    )


ARCHITECTURES = (Architecture(("cohere2moe",), build_cohere2moe, _read, nextn=True),)
