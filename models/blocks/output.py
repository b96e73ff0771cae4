"""The end of a graph: logits or embeddings of the rows that are wanted. And the graph that a model has over pooled
embeddings."""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from ..names import tensor_name
from .build import Build
from .ffn import ACTIVATIONS
from .inputs import build_inp_logit_ids, build_inp_out_ids, token_embd
from .norm import build_norm


def build_lm_head(b: Build, cur: Tensor, *, bias: bool = True, hidden: Tensor | None = None) -> Graph:
    """The logits of `cur`, ne [n_embd, n_outputs]: `result_output`, ne [n_vocab, n_outputs], which ends the graph. A
    model without output weights uses its embeddings (tied). `bias`: as for `Build.linear`. A graph of embeddings ends
    with `result_embd` instead. In a graph of hidden states, `hidden` are those states (default: `cur`), and n_logits of
    the rows get logits."""
    if b.embeddings:
        return build_result_embd(b, cur)
    if b.n_logits:
        b.hidden = (cur if hidden is None else hidden).set_output()
        b.graph.build_forward_expand(b.hidden)
        cur = gg.get_rows(cur, build_inp_logit_ids(b))
    _pooling_weights(b)  # a model with logits may have these weights too
    n_vocab = b.hparams.n_vocab
    output = b.optional("output", (cur.ne[0], n_vocab))
    logits = gg.mul_mat(token_embd(b) if output is None else output, cur)
    cur = b.adapters.product(logits, tensor_name("output"), cur)
    output_b = b.optional("output", (n_vocab,), suffix="bias")
    if output_b is not None and bias:
        cur = gg.add(b.cb(cur, "result_output_no_bias"), output_b)
    if b.hparams.f_logit_scale:
        cur = gg.scale(b.cb(cur, "result_output_unscaled"), b.hparams.f_logit_scale)
    cap = b.hparams.f_final_logit_softcapping
    if cap:
        cur = gg.scale(gg.tanh(gg.scale(b.cb(cur, "result_output_uncapped"), 1.0 / cap)), cap)
    b.graph.build_forward_expand(b.cb(cur, "result_output").set_output())
    return b.graph


def build_result_embd(b: Build, cur: Tensor) -> Graph:
    """End the graph with `cur`, ne [n_embd, n_outputs], or with the output of layer `b.layer`, without the nodes after
    it."""
    _pooling_weights(b)
    if b.layer is not None:
        hidden = b.named("inp_embd") if b.layer == 0 else b.named(f"l_out-{b.layer - 1}")
        full = b.graph.build_forward_expand(hidden).nodes
        b.graph = Graph()
        if hidden.ne[1] != b.n_tokens:
            raise ModelError(f"{hidden.name} has {hidden.ne[1]} streams of each token: no embeddings after this layer")
        for node in takewhile(lambda t: t is not hidden, full):  # those before it store K and V
            b.graph.build_forward_expand(node)
        b.graph.build_forward_expand(hidden)
        cur = gg.get_rows(hidden, build_inp_out_ids(b))
    b.graph.build_forward_expand(b.cb(cur, "result_embd").set_output())
    return b.graph


class _PoolingWeights(NamedTuple):
    """Weights that a model may have for pooled embeddings: two products (embedding-gemma); in rerankers a dense layer,
    its norm, and the product that gives the scores."""

    dense: tuple[Tensor | None, Tensor | None]
    cls: tuple[Tensor | None, Tensor | None]  # weight, bias
    norm: Tensor | None
    out: tuple[Tensor | None, Tensor | None]


def _pooling_weights(b: Build) -> _PoolingWeights:
    n_embd, n_out = b.hparams.n_embd, b.hparams.rank_head.n_out
    size = (b.weights.ne("dense_2.weight") or (0, n_embd))[1]
    n_cls = b.n_out("cls", (n_embd, n_out))
    return _PoolingWeights(
        (b.optional("dense_2", (n_embd, size)), b.optional("dense_3", (size, n_embd))),
        (b.optional("cls", (n_embd, n_cls)), b.optional("cls", (n_cls,), suffix="bias")),
        b.optional("cls.norm", (n_embd,)),
        (b.optional("cls.output", (n_embd, n_out)), b.optional("cls.output", (n_out,), suffix="bias")),
    )


def build_pooling(b: Build, rank: bool) -> Graph:
    """The graph over pooled embeddings. Each row of its input `inp_pooled`, ne [n_embd, n_tokens], is the pooled
    embedding of a sequence. It ends with `result_embd_pooled`, ne [n_out, n_tokens]: embeddings, or the scores of a
    reranker. The graph is empty when the model leaves pooled embeddings as they are."""
    with b.ctx:
        h, rule = _pooling_weights(b), b.hparams.rank_head
        inp = cur = b.input("inp_pooled", DType.F32, (b.hparams.n_embd, b.n_tokens), None)
        if rank:
            if h.cls[0] is not None:
                cur = b.cb(ACTIVATIONS[rule.act](_linear(cur, h.cls)), f"cls_{rule.act}")
                cur = build_norm(b, cur, "cls.norm", "cls_norm", kind="layer") if h.norm is not None else cur
            cur = _linear(cur, h.out)
            cur = gg.soft_max(cur) if rule.soft_max and cur is not inp else cur
        else:
            for w in h.dense:
                cur = _linear(cur, (w, None))
        if cur is not inp:
            b.graph.build_forward_expand(b.cb(cur, "result_embd_pooled").set_output())
        return b.graph


def _linear(cur: Tensor, layer: tuple[Tensor | None, Tensor | None]) -> Tensor:
    weight, bias = layer
    if weight is None:
        return cur
    cur = gg.mul_mat(weight, cur)
    return cur if bias is None else gg.add(cur, bias)
