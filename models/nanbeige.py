"""Nanbeige 4 (huggingface.co/Nanbeige): Llama that may run through its layers several times, each time with K and V of
its own, and the last norm in between unless the file says otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from pyggml import ops as gg
from pyggml.gguf_io.constants import Keys
from pyggml.graph import Graph

from .architecture import Architecture
from .blocks import (
    Build,
    build_inp_embd,
    build_inp_pos,
    build_lm_head,
    build_norm,
    build_out_rows,
    build_rope_factors,
)
from .decoder import Decoder
from .hparams import MAX_LAYERS, HParams
from .metadata import Reader, read_hparams

_NUM_LOOPS, _SKIP_LOOP_FINAL_NORM = "{arch}.num_loops", "{arch}.skip_loop_final_norm"  # not in the gguf package


@dataclass(frozen=True, kw_only=True)
class NanbeigeHParams(HParams):
    """Whether nothing is normed between two loops."""

    skip_loop_final_norm: bool


def _read(r: Reader) -> NanbeigeHParams:
    n_loops = r.integer(_NUM_LOOPS, 1)
    if not 0 < n_loops <= MAX_LAYERS:
        r.fail(_NUM_LOOPS, f"must be 1 to {MAX_LAYERS}, not {n_loops}")
    skip = r.boolean(_SKIP_LOOP_FINAL_NORM, False)
    n_layer = r.integer(Keys.LLM.BLOCK_COUNT) * n_loops
    return read_hparams(NanbeigeHParams, r, n_layer=n_layer, n_loops=n_loops, skip_loop_final_norm=skip)


def build_nanbeige(b: Build[NanbeigeHParams]) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp, llama = b.hparams, Decoder()
    with b.ctx:
        inpL = build_inp_embd(b)
        inp_pos = build_inp_pos(b)
        factors = build_rope_factors(b)
        for il in range(hp.n_layer):
            if il and il % (hp.n_layer // hp.n_loops) == 0 and not hp.skip_loop_final_norm:
                inpL = build_norm(b, inpL, "output_norm", f"loop_norm-{il}")
            cur = llama.attention(b, build_norm(b, inpL, "attn_norm", "attn_norm", il), inp_pos, factors, il)
            cur, inpL = build_out_rows(b, il, cur, inpL)
            ffn_inp = b.cb(gg.add(cur, inpL), "ffn_inp", il)
            cur = llama.ffn(b, build_norm(b, ffn_inp, "ffn_norm", "ffn_norm", il), il)
            inpL = b.cb(gg.add(cur, ffn_inp), "l_out", il)
        return build_lm_head(b, build_norm(b, inpL, "output_norm", "result_norm"))


ARCHITECTURES = (Architecture(("nanbeige",), build_nanbeige, _read),)
