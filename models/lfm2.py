"""LFM2 (huggingface.co/LiquidAI): gated short convolutions, and some layers that attend. Its mixtures too."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build
from .blocks.states import build_conv
from .decoder import PlainDecoder
from .hparams import HParams, StateShape
from .metadata import Reader, read_hparams


@dataclass(frozen=True, kw_only=True)
class LFM2HParams(HParams):
    """d_conv: tokens that a convolution sees."""

    d_conv: int

    def state(self, il: int) -> StateShape:
        """Layers without heads are convolutions."""
        return StateShape() if self.has_kv(il) else StateShape(r=(self.d_conv - 1) * self.n_embd)


@dataclass(frozen=True, kw_only=True)
class LFM2(PlainDecoder[LFM2HParams]):
    """A decoder in which layers without heads have a short convolution instead of attention."""

    def attention(self, b: Build[LFM2HParams], cur: Tensor, pos: Tensor, factors: Tensor | None, il: int) -> Tensor:
        hp = b.hparams
        if hp.has_kv(il):
            return super().attention(b, cur, pos, factors, il)
        n = hp.n_embd
        bcx = b.linear("shortconv.in_proj", cur, 3 * n, "conv_in_proj", il)
        gate_in, gate_out, x = (gg.view_2d(bcx, n, b.n_tokens, bcx.nb[1], i * n * bcx.nb[0]) for i in range(3))
        y = build_conv(b, b.cb(gg.mul(gate_in, x), "conv_bx", il), "shortconv.conv", hp.d_conv, il)
        return b.linear("shortconv.out_proj", b.cb(gg.mul(gate_out, y), "conv_gated", il), n, "conv_out_proj", il)


def _read(r: Reader) -> LFM2HParams:
    d_conv = r.integer(Keys.ShortConv.L_CACHE)
    if d_conv < 2:
        r.fail(Keys.ShortConv.L_CACHE, f"must be 2 or more, not {d_conv}")
    if not r.boolean(Keys.Attention.CAUSAL, True):
        r.fail(Keys.Attention.CAUSAL, "is false: convolutions over tokens that follow are not supported")
    return read_hparams(
        LFM2HParams, r, d_conv=d_conv, rope_type="neox", n_swa=r.integer(Keys.Attention.SLIDING_WINDOW, 0)
    )


ARCHITECTURES = (
    Architecture(
        ("lfm2", "lfm2moe"),
        LFM2(qk_norm="head", rope_factors=False, output_norm="token_embd_norm").build,
        _read,
        "hybrid",
    ),
)
