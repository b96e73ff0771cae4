"""Refact (huggingface.co/smallcloudai/Refact-1_6B-fim): Llama with ALiBi instead of a rope.

There is no Refact with experts. llama.cpp would read such a file as a model without networks; this page does the same.
"""

from __future__ import annotations

from pyggml import ops as gg
from pyggml.tensor import Tensor

from .blocks import Build, build_moe_ffn
from .decoder import PlainDecoder, decoder


class RefactDecoder(PlainDecoder):
    """Decoders that leave experts alone."""

    def ffn(self, b: Build, cur: Tensor, il: int) -> Tensor:
        """The network, or silu."""
        if not b.hparams.is_moe(il):
            return super().ffn(b, cur, il)
        build_moe_ffn(b, cur, il)  # asks for the weights
        return b.cb(gg.silu(cur), "ffn_silu", il)


ARCHITECTURES = (decoder("refact", build=RefactDecoder(biases="qkv"), rope_layers=0, f_max_alibi_bias=8.0),)
