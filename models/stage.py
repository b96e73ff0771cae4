"""Graphs that begin in the middle of a model: their input is the output of the layer before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import dropwhile

from pyggml.errors import ModelError
from pyggml.graph import Graph
from pyggml.tensor import Tensor

from .blocks import Build, Input, given_embd


def begin_at(b: Build) -> None:
    """Leave out of the graph, which reads tokens, everything before layer `b.first`. The output of the layer before it
    becomes the input `inp_embd`, F32 ne [n_embd, n_tokens].

    Raises ModelError when the rest of the graph reads anything else from before: the tokens, an earlier layer, or its
    K, V or states.
    """
    hidden, full = b.named(f"l_out-{b.first - 1}"), b.graph.nodes
    if hidden.ne[1] != b.n_tokens:
        raise ModelError(f"{hidden.name} has {hidden.ne[1]} streams of each token: no stage can begin after this layer")
    hidden.op, hidden.op_params, hidden.src = "none", {}, ()
    b.graph = Graph()
    for node in dropwhile(lambda t: t is not hidden, full):
        if node is not hidden:
            b.graph.build_forward_expand(node)
    of_tokens = [name for name, i in b.inputs.items() if i.of_tokens]
    before = {*_earlier(b), *(b.inputs.pop(name).tensor for name in of_tokens)}
    for t in b.graph.leafs:
        if t in before:
            what = "the tokens" if t.name.startswith("inp_") else t.name
            raise ModelError(f"layers from {b.first} on read {what} too: this model has no stage that begins there")
    b.inputs["inp_embd"] = Input(hidden.set_input(), given_embd)
    b.embd = True


def _earlier(b: Build) -> Iterator[Tensor]:
    """The tensors of the memory that belong to layers before `b.first`."""
    for kv in b.kv.caches:
        for tensors in (kv.k_l, kv.v_l):
            yield from (t for il, t in zip(kv.layers, tensors, strict=False) if il < b.first)
    if b.kv.states is not None:
        for tensors in (b.states.r_l, b.states.s_l, b.states.p_l):
            yield from (t for il, t in tensors.items() if il < b.first)
