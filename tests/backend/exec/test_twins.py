"""Layers that are alike are built once in a graph: what comes of it is as if each had been built, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.graph import Graph
from pyggml.llm.context import LlamaContext
from pyggml.llm.graphs import Graphs, GraphSize
from pyggml.llm.model import load_model
from pyggml.sched import Scheduler

from ...random_model import write_random

N_LAYER = 6
ARCHS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"attention.key_length": 8, "attention.value_length": 8},
    "gemma3": {"attention.sliding_window": 16, "attention.key_length": 8, "attention.value_length": 8},
    "phi2": {"attention.layer_norm_epsilon": 1e-5},
    "qwen2moe": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    "gpt2": {"attention.layer_norm_epsilon": 1e-5},
    "bert": {"attention.layer_norm_epsilon": 1e-5, "attention.causal": False},
    "mamba": {"ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.time_step_rank": 4},
    "minicpm3": {
        "attention.key_length": 12,
        "attention.value_length": 8,
        "rope.dimension_count": 4,
        "attention.q_lora_rank": 16,
        "attention.kv_lora_rank": 16,
    },
    "smallthinker": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
}


@pytest.fixture(params=ARCHS)
def ctx(request: pytest.FixtureRequest, tmp_path: Path) -> LlamaContext:
    kv = {"block_count": N_LAYER, **ARCHS[request.param]}
    return load_model(write_random(tmp_path / "m.gguf", request.param, kv)).new_context(128, n_ubatch=64)


def content(graph: Graph) -> list[tuple[Any, ...]]:
    """All that there is to say of a graph."""
    at = {t: i for i, t in enumerate((*graph.leafs, *graph.nodes))}
    return [
        (
            *(t.name, t.op, t.dtype, t.ne, t.nb, t.rank, t.flags, {k: str(v) for k, v in t.op_params.items()}),
            [None if s is None else at[s] for s in t.src],
            None if t.view_src is None else at[t.view_src],
            str(t.view_offs),
            graph.nodes and t.site == graph.nodes[0].site,
        )
        for t in at
    ]


def test_graphs_are_those_of_all_layers(ctx: LlamaContext) -> None:
    graphs: Graphs = vars(ctx)["_graphs"]
    for n_tokens, n_outputs, part in ((1, 1, 4), (2, 1, 2), (7, 3, 1), (33, 33, 2), (64, 1, 1)):
        size = GraphSize(n_tokens, n_outputs, False, tuple(c.size // part for c in ctx.memory.caches))
        repeated = graphs.build(size).graph
        assert sum(t.like is not None for t in repeated.nodes) >= repeated.n_nodes // N_LAYER
        vars(graphs)["_twins"].clear()
        plain = graphs.build(size).graph
        assert not any(t.like is not None for t in plain.nodes)
        assert content(repeated) == content(plain)


def test_programs_are_those_of_all_layers(ctx: LlamaContext) -> None:
    """The steps, the memory and the records, but for their addresses of scratch memory and plan."""
    for n_tokens in (1, 5, 40):
        graph = ctx.build_graph(n_tokens)
        made = ctx.scheduler.alloc(graph)
        (split,), offsets = made.splits, dict(made.plan.offsets)
        repeated, words = split.steps, _words(made.programs[0])
        assert sum(s.like is not None for s in repeated) >= len(repeated) // N_LAYER
        for t in graph.nodes:
            t.like = None
        again = Scheduler([ctx.scheduler.backends["cpu"]])
        vars(again)["_buffers"].update(vars(ctx.scheduler)["_buffers"])
        plain = again.alloc(graph)
        assert [s._replace(like=None) for s in repeated] == plain.splits[0].steps
        assert plain.plan.offsets == offsets
        np.testing.assert_array_equal(_words(plain.programs[0]), words)


def _words(program: Any) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    n = program.lowered.words().shape[1] - 4
    return program.lowered.words()[:, :n].copy()


def test_what_is_watched_is_built(ctx: LlamaContext) -> None:
    with ctx.model.tap("l_out-3") as tap:
        ctx.decode([1, 2, 3])
    assert list(tap) == ["l_out-3"]


def test_an_output_of_a_repeated_layer_is_kept(ctx: LlamaContext) -> None:
    ctx.decode([1, 2, 3])
    name = "ffn_inp-3" if ctx.build_graph(3).get_tensor("ffn_inp-3") is not None else "attn_norm-3"
    graph = ctx.build_graph(3)
    node = graph.get_tensor(name)
    assert node is not None
    node.set_output()
    steps = ctx.scheduler.alloc(graph).splits[0].steps
    assert not any(node in s.inner for s in steps)
    assert node not in ctx.scheduler.last.plan.recycled  # pyright: ignore[reportOptionalMemberAccess]


def test_a_run_is_repeated_of_the_like_alone() -> None:
    with gg.Context() as c:
        x, other = c.new_tensor(gg.F32, (64,), name="x"), c.new_tensor(gg.F32, (1,), name="other")
        graph = Graph(size=4)
        graph.build_forward_expand(gg.scale(gg.neg(x), 2.0))
    for nodes, to, says in (
        (range(2), {x: other}, "other.* cannot stand for .*x"),
        (range(0), {}, "nodes range"),
        (range(9), {}, "has 2"),
        (range(2), {x: c.new_tensor(gg.F32, (64,))}, "full"),
    ):
        with pytest.raises(gg.GraphError, match=says):
            graph.repeat(nodes, to, [""] * len(nodes))
        assert (graph.n_nodes, graph.n_leafs) == (2, 1)


def test_a_pin_is_of_one_node_alone() -> None:
    with gg.Context() as c:
        x = c.from_numpy(np.arange(64, dtype=np.float32), name="x")
        graph = Graph().build_forward_expand(gg.scale(gg.neg(x), 2.0))
    neg, scale = graph.nodes
    scale.set_name("y-0")
    graph.repeat(range(2), {x: scale}, ("", "y-1"))
    assert [t.name for t in graph.nodes] == ["node_0", "y-0", "node_2", "y-1"]
    scheduler = Scheduler(("cpu", "ref"))
    scheduler.set_tensor_backend(neg, "ref")
    assert [*scheduler.assign(graph).values()] == ["ref", "cpu", "cpu", "cpu"]
    scheduler.set_tensor_backend(neg, None)
    scheduler.set_tensor_backend(graph.nodes[3], "ref")
    assert [*scheduler.assign(graph).values()] == ["cpu", "cpu", "cpu", "ref"]
    scheduler.compute(graph)
    assert np.array_equal(graph.nodes[3].numpy(), 4 * np.arange(64, dtype=np.float32))
