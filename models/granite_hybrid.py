"""Granite 4 (huggingface.co/ibm-granite): Granite's decoder, where most layers are Mamba-2 instead of attention."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build
from .blocks.ssm import build_mamba2
from .decoder import PlainDecoder
from .mamba import MambaHParams, read_ssm
from .metadata import Reader, read_hparams


@dataclass(frozen=True, kw_only=True)
class GraniteHybrid(PlainDecoder[MambaHParams]):
    """A decoder in which layers without heads have Mamba-2 instead of attention."""

    def attention(self, b: Build[MambaHParams], cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        hp = b.hparams
        if hp.has_kv(il):
            return super().attention(b, cur, pos, factors, il)
        return build_mamba2(b, cur, hp.ssm, il)


def _read(r: Reader) -> MambaHParams:
    logit_scale = r.number(Keys.LLM.LOGIT_SCALE, 0.0)
    return read_hparams(
        MambaHParams,
        r,
        ssm=read_ssm(r),
        rope_layers=int(r.boolean(Keys.Rope.SCALING_FINETUNED, True)),
        f_embedding_scale=r.number(Keys.LLM.EMBEDDING_SCALE, 0.0),
        f_residual_scale=r.number(Keys.LLM.RESIDUAL_SCALE, 0.0),
        f_logit_scale=1.0 / logit_scale if logit_scale else 0.0,
    )


ARCHITECTURES = (Architecture(("granitehybrid",), GraniteHybrid().build, _read, "hybrid"),)
