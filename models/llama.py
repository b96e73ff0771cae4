"""The llama architecture: Llama 1 to 3, Mistral, Mixtral and all that share it."""

from __future__ import annotations

from collections.abc import Iterator

from pyggml import ops as gg
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .blocks import (
    KV,
    Build,
    build_ffn,
    build_inp_embd,
    build_inp_kq_mask,
    build_inp_out_ids,
    build_inp_pos,
    build_moe_ffn,
    build_norm,
    build_rope,
    llm_build_kv,
    rope_factors,
)
from .hparams import HParams
from .names import TensorSpec, bias, weight


def llama_tensors(hp: HParams) -> Iterator[TensorSpec]:
    """The tensors of a model with these hparams, token embeddings first."""
    yield weight(hp, "token_embd")
    yield weight(hp, "output_norm")
    yield weight(hp, "output", optional=True)  # tied to token_embd where it is absent
    for role in ("rope_freqs", "rope_factors_long", "rope_factors_short"):
        yield weight(hp, role, optional=True)
    dense, experts = ("ffn_gate", "ffn_up", "ffn_down"), ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    for il in range(hp.n_layer):
        for role in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm"):
            yield weight(hp, role, il)
        for role in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield bias(hp, role, il)
        for role in ("ffn_gate_inp", *experts) if hp.n_expert else dense:
            yield weight(hp, role, il)
        for role in () if hp.n_expert else dense:
            yield bias(hp, role, il)


def build_llama(b: Build) -> Graph:
    """The graph of one ubatch; its last node `result_output` has ne [n_vocab, n_outputs]."""
    hp = b.hparams
    with b.ctx:
        inpL = build_inp_embd(b)
        inp_pos = build_inp_pos(b)
        factors = rope_factors(hp, b.weights, b.kv.size)
        for il in range(hp.n_layer):
            inpSA = inpL
            cur = build_norm(b, inpL, "attn_norm", "attn_norm", il)

            # self-attention
            n = hp.layer(il)
            Qcur = b.linear("attn_q", cur, "Qcur", il)
            Kcur = b.linear("attn_k", cur, "Kcur", il)
            Vcur = b.linear("attn_v", cur, "Vcur", il)
            Qcur = build_rope(b, Qcur, n.n_head, inp_pos, factors, "Qcur", il)
            Kcur = build_rope(b, Kcur, n.n_head_kv, inp_pos, factors, "Kcur", il)
            cur = llm_build_kv(b, KV(Qcur, Kcur, Vcur, build_inp_kq_mask(b, il), il))

            if il == hp.n_layer - 1:  # from here on only the rows of which logits are wanted
                inp_out_ids = build_inp_out_ids(b)
                cur = gg.get_rows(cur, inp_out_ids)
                inpSA = gg.get_rows(inpSA, inp_out_ids)
            ffn_inp = b.cb(gg.add(cur, inpSA), "ffn_inp", il)

            # feed-forward network
            cur = build_norm(b, ffn_inp, "ffn_norm", "ffn_norm", il)
            cur = build_moe_ffn(b, cur, il) if hp.n_expert else build_ffn(b, cur, il)
            inpL = b.cb(gg.add(cur, ffn_inp), "l_out", il)

        cur = build_norm(b, inpL, "output_norm", "result_norm")
        b.graph.build_forward_expand(b.cb(_output(b, cur), "result_output").set_output())
    return b.graph


def _output(b: Build, cur: Tensor) -> Tensor:
    output = b.optional("output")
    return gg.mul_mat(b.weight("token_embd") if output is None else output, cur)
