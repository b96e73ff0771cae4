"""gpt-oss (OpenAI, arXiv 2508.10925): llama with a window in every other layer, attention sinks, biases everywhere, and
a mixture of experts whose gate and up are clamped. Its experts come in MXFP4."""

from __future__ import annotations

from pyggml import ops as gg
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_moe_ffn
from .decoder import PlainDecoder
from .hparams import HParams, Router
from .metadata import Reader, read_hparams, read_router, read_window

_ALPHA, _LIMIT = 1.702, 7.0


def _swiglu_oai(gate: Tensor, up: Tensor | None) -> Tensor:
    return gg.swiglu_oai(gate, up, _ALPHA, _LIMIT)


class GptOss(PlainDecoder):
    """Experts choose by their logits; the softmax is of those chosen."""

    def ffn(self, b: Build, cur: Tensor, il: int) -> Tensor:
        """The mixture of experts of layer `il`."""
        return build_moe_ffn(b, cur, il, _swiglu_oai)


def _read(r: Reader) -> HParams:
    router = read_router(r, Router(of_selected=True, norm=False))
    return read_hparams(HParams, r, rope_type="neox", router=router, **read_window(r, 2))


ARCHITECTURES = (Architecture(("gpt-oss",), GptOss(ffn_norm="post_attention_norm", sinks="all").build, _read),)
