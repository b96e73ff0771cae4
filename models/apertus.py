"""Apertus (arXiv:2509.14233): Llama with Q and K of each head normed, and a network without a gate. The activation is
xIELU (arXiv:2411.13010), whose parameters differ from layer to layer: numbers in files, tensors when they are
trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build
from .decoder import PlainDecoder
from .hparams import HParams
from .metadata import Reader, read_hparams


@dataclass(frozen=True, kw_only=True)
class ApertusHParams(HParams):
    """The numbers of xIELU in each layer."""

    xielu_alpha_n: tuple[float, ...]
    xielu_alpha_p: tuple[float, ...]
    xielu_beta: tuple[float, ...]
    xielu_eps: tuple[float, ...]


class Apertus(PlainDecoder[ApertusHParams]):
    """The network with xIELU."""

    def ffn(self, b: Build[ApertusHParams], cur: Tensor, il: int) -> Tensor:
        """The feed-forward network of layer `il`."""
        hp = b.hparams
        up = b.linear("ffn_up", cur, hp.layer(il).n_ff, "ffn_up", il)
        beta, eps = hp.xielu_beta[il], hp.xielu_eps[il]
        alpha_n, alpha_p = (b.optional(f"xielu.alpha_{x}", (1,), il, "") for x in "np")
        if alpha_n is None or alpha_p is None:
            par = gg.xielu(up, hp.xielu_alpha_n[il], hp.xielu_alpha_p[il], beta, eps)
        else:
            par = _xielu(up, alpha_n, alpha_p, beta, eps)
        return b.linear("ffn_down", b.cb(par, "ffn_xielu", il), hp.n_embd, "ffn_out", il)


def _xielu(x: Tensor, alpha_n: Tensor, alpha_p: Tensor, beta: float, eps: float) -> Tensor:
    """`xielu` with numbers that are tensors of one element: ne as `x`."""
    positive = gg.sqr(gg.relu(x))
    negative = gg.mul(gg.sub(gg.expm1(gg.clamp(x, -math.inf, eps)), x), gg.step(gg.neg(x)))
    both = gg.add(
        gg.mul(positive, gg.softplus(alpha_p)),
        gg.mul(negative, gg.scale_bias(gg.softplus(alpha_n), 1.0, beta)),
    )
    return gg.add(both, gg.scale(x, beta))


def _read(r: Reader) -> ApertusHParams:
    keys = {
        "alpha_n": Keys.xIELU.ALPHA_N,
        "alpha_p": Keys.xIELU.ALPHA_P,
        "beta": Keys.xIELU.BETA,
        "eps": Keys.xIELU.EPS,
    }
    numbers = {f"xielu_{name}": r.numbers(key, r.integer(Keys.LLM.BLOCK_COUNT)) for name, key in keys.items()}
    return read_hparams(ApertusHParams, r, rope_type="neox", **numbers)


ARCHITECTURES = (Architecture(("apertus",), Apertus(qk_norm="head").build, _read),)
