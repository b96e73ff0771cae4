"""Maple: Qwen3's mixture of experts where layers with a sliding window are roped and the others are not, and what
enters the product of gate and value is limited. Source: llama.cpp's reader of its files."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_moe_ffn, limited
from .decoder import PlainDecoder
from .hparams import HParams
from .metadata import Reader, read_hparams, read_swa_pattern


@dataclass(frozen=True, kw_only=True)
class MapleHParams(HParams):
    """The limits of the experts' gate and up rows, by layer; 0: no limit."""

    swiglu_clamp_exp: tuple[float, ...]


class MapleDecoder(PlainDecoder[MapleHParams]):
    """Decoders with limited experts."""

    def ffn(self, b: Build[MapleHParams], cur: Tensor, il: int) -> Tensor:
        """The mixture of experts of layer `il`."""
        return build_moe_ffn(b, cur, il, limited(b.hparams.swiglu_clamp_exp[il]))


def _read(r: Reader) -> MapleHParams:
    pattern = read_swa_pattern(r, 0)
    return read_hparams(
        MapleHParams,
        r,
        rope_type="neox",
        n_swa=r.integer(Keys.Attention.SLIDING_WINDOW),
        swa_pattern=pattern,
        rope_layers=pattern or 1,
        rope_freq_base_swa=r.number(Keys.Rope.FREQ_BASE_SWA, 0.0),
        swiglu_clamp_exp=r.numbers(Keys.LLM.SWIGLU_CLAMP_EXP, r.integer(Keys.LLM.BLOCK_COUNT)),
    )


ARCHITECTURES = (Architecture(("maple",), MapleDecoder(qk_norm="head").build, _read),)
