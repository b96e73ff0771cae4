"""What tools show of graphs whose sizes follow from Vars: names where a graph is shown, what is there now where values
are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.inspect.notebook import plan_html, tensor_html
from pyggml.inspect.record import record
from pyggml.inspect.taps import Edit, Tap


class Program:
    def __init__(self) -> None:
        self.n, self.head = gg.Var("n", 512), gg.Var("head", 7)
        with gg.Context() as self.ctx:
            self.x = self.ctx.new_tensor(gg.F32, (8, self.n), "x").set_input()
            self.cache = self.ctx.from_numpy(np.zeros((8, 8), np.float32), name="cache")
            twice = (self.x * 2).set_name("twice")
            self.y = gg.soft_max(gg.repeat_4d(twice, 8, self.n, 3, 1)).set_name("y").set_output()
            store = gg.cpy(twice[0], self.cache[self.head]).set_name("store")
        self.graph = gg.Graph().build_forward_expand(self.y).build_forward_expand(store)

    def run(self, n: int) -> np.ndarray[Any, Any]:
        x = np.random.default_rng(n).standard_normal((n, 8)).astype(np.float32)
        gg.compute(self.graph, {self.x: x})
        e = np.exp(2 * x - (2 * x).max(-1, keepdims=True))
        return np.tile(e / e.sum(-1, keepdims=True), (3, 1, 1))


@pytest.fixture
def p() -> Program:
    return Program()


def test_graphs_are_shown_with_names(p: Program) -> None:
    assert re.search(r"repeat .* F32 +\[8, n, 3, 1\]  <- twice\n", str(p.graph))
    text = gg.dump_dot(p.graph, scheduler=gg.Scheduler(("cpu",)))
    assert r"y\nsoft_max scale=1 max_bias=0\nF32 [8, n, 3, 1]\non cpu: CPU compute at" in text
    assert "offset=32*head" in text and "at 16384, 96*n bytes" in text
    assert text == gg.dump_dot(Program().graph, scheduler=gg.Scheduler(("cpu",)))
    p.n.bind(5)
    p.head.bind(3)
    assert text == gg.dump_dot(p.graph, scheduler=gg.Scheduler(("cpu",)))
    for options in ({"fold": True}, {"nodes": ["y"]}, {"against": Program().graph}):
        assert "[8, n, 3, 1]" in gg.dump_dot(p.graph, **options)
    assert "<code>[8, n, 1, 1], [4, 32, 32*n, 32*n]</code>" in tensor_html(p.x)
    _, plan = gg.Scheduler(("cpu",)).plan(p.graph)
    assert "96*n bytes at 16384" in plan_html(plan)
    assert repr(p.ctx) == "<Context 2 leafs of 32*n + 256 bytes, 6 nodes>"


def test_values_are_those_of_now(p: Program, tmp_path: Path) -> None:
    for n in (5, 300):
        want = p.run(n)
        np.testing.assert_allclose(p.y.numpy(), want, rtol=1e-5, atol=1e-6)
        assert np.asarray(p.y).shape == np.from_dlpack(p.y).shape == (3, n, 8)
        assert p.y.tobytes() == p.y.numpy().tobytes() and f"{24 * n} values" not in tensor_html(p.x)
        gg.save(tmp_path / "a.gguf", {"y": p.y, "x": p.x})
        file = gg.load(tmp_path / "a.gguf")
        assert file["y"].shape == (3, n, 8) and np.array_equal(file["y"].numpy(), p.y.numpy())
    p.n.bind(4)
    with pytest.raises(gg.AllocError, match="holds values for n = 300"):
        gg.save(tmp_path / "b.gguf", {"y": p.y})
    assert "holds values for n = 300" in tensor_html(p.y)


def test_taps_and_edits(p: Program) -> None:
    scheduler = gg.Scheduler(("cpu",))
    with Tap(scheduler.watches, ("twice", "y")) as tap, Edit(scheduler.watches, ("twice",), lambda x: x * 0 + 1):
        for n in (2, 7):
            p.n.bind(n)
            p.x.set(np.ones((n, 8)))
            scheduler.compute(p.graph)
    assert [a.shape for a in tap["twice"]] == [(2, 8), (7, 8)] and tap["y"][1].shape == (3, 7, 8)
    assert all((a == 0.125).all() for a in tap["y"])


def test_a_recorded_run_and_its_page(p: Program, tmp_path: Path) -> None:
    x = np.ones((6, 8), np.float32)
    run = record(p.graph, {"x": x})
    assert p.n.value == 6 and next(s for s in run.steps if s.name == "y").n_bytes == 2 * 4 * 6 * 8 * 3
    assert r"F32 [8, n, 3, 1]" in gg.dump_dot(p.graph, run=run)
    gg.inspect(p.graph, tmp_path / "p.html", inputs={"x": x})
    found = re.search(r'\{"title".*?(?=</script>)', (tmp_path / "p.html").read_text(), flags=re.S)
    assert found is not None
    data = json.loads(found.group().rstrip(" ;\n"))
    rows = {t["name"]: t for t in data["tensors"]}
    assert rows["y"]["ne"] == [8, 6, 3, 1] and rows["x"]["shape"] == [6, 8] and data["weights"] == 256
