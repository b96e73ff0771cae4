"""HRM-Text, and Mimir 1B: the hierarchical reasoning model (arXiv 2506.21734) as a decoder.

There are two stacks of layers, the low and the high one, and each token has a state for each stack. In a cycle the low
stack runs several times over the sum of both states, then the high stack runs once. Each run has K and V of its own, so
the cache is as large as that of a model with a layer for each run of a layer. Norms have no weights. Attention is gated
by a sigmoid.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.gguf_io.keys import Keys
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .architecture import Architecture
from .blocks import Build, build_inp_embd, build_inp_pos, build_lm_head, build_norm, build_out_rows
from .decoder import PlainDecoder
from .hparams import HParams
from .metadata import Reader, read_hparams

_STACK, _HIGH, _LOW = (f"{{arch}}.hrm.{name}" for name in ("layers_per_stack", "h_cycles", "l_cycles"))


@dataclass(frozen=True, kw_only=True)
class HRMHParams(HParams):
    """Layers of a stack, cycles, and runs of the low stack in each. `n_layer` counts the layers of all runs."""

    n_stack: int
    n_high: int
    n_low: int

    def block(self, il: int) -> int:
        run, layer = divmod(il, self.n_stack)
        return layer + (self.n_stack if (run + 1) % (self.n_low + 1) == 0 else 0)


def _read(r: Reader) -> HRMHParams:
    n_stack, n_high, n_low = (r.integer(key) for key in (_STACK, _HIGH, _LOW))
    if not (n_stack and n_high and n_low) or r.n_layer != n_stack * n_high * (n_low + 1):
        n = f"{n_high} cycles of {n_low} + 1 runs of {n_stack} layers"
        r.fail(Keys.LLM.BLOCK_COUNT, f"says that there are {r.n_layer} layers, where there are {n}")
    return read_hparams(
        HRMHParams,
        r,
        rope_type="neox",
        f_embedding_scale=r.number(Keys.LLM.EMBEDDING_SCALE, 0.0),
        n_stack=n_stack,
        n_high=n_high,
        n_low=n_low,
    )


def build_hrm_text(b: Build[HRMHParams]) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        high = build_inp_embd(b)
        low = b.weight("hrm.z_l_init", (hp.n_embd,), suffix="")
        pos = build_inp_pos(b)
        first = 0
        for _ in range(hp.n_high):
            for _ in range(hp.n_low):
                low = _stack(b, hp, gg.add(high, low), pos, first)
                first += hp.n_stack
            high = _stack(b, hp, gg.add(high, low), pos, first)
            first += hp.n_stack
        return build_lm_head(b, b.cb(high, "result_norm"))


def _stack(b: Build, hp: HRMHParams, inpL: Tensor, pos: Tensor, first: int) -> Tensor:
    """One run of a stack, whose first layer is `first`, normed: ne as `inpL`, or the rows that are wanted."""
    plain = PlainDecoder(attn_gate="sigmoid")
    for il in range(first, first + hp.n_stack):
        cur = plain.attention(b, build_norm(b, inpL, "", "attn_norm", il), pos, None, il)
        cur, inpL = build_out_rows(b, il, cur, inpL)
        ffn_inp = b.cb(gg.add(cur, inpL), "ffn_inp", il)
        cur = plain.ffn(b, build_norm(b, ffn_inp, "", "ffn_norm", il), il)
        inpL = b.cb(gg.add(cur, ffn_inp), "l_out", il)
    return build_norm(b, inpL, "", "stack_norm", first)


ARCHITECTURES = (Architecture(("hrm_text",), build_hrm_text, _read),)
