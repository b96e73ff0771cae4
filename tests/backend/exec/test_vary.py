"""One graph for many sizes: elements that follow from a Var are bound when it runs, anything else is refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu.backend import CpuBackend, CpuProgram
from pyggml.backends.cpu.fusions import Fusion, Nodes
from pyggml.backends.cpu.lower import cost_ns
from pyggml.backends.ref import RefBackend
from pyggml.buffers.alloc import Step
from pyggml.graph import Graph
from pyggml.sched import Scheduler
from pyggml.tensor import Size, Tensor, Var
from pyggml.var import Varies, largest

SIZE = 48


class Attention:
    """softmax(k q) v over the first n rows of a cache, in memory that all sizes share."""

    def __init__(self, n_kv_heads: int = 1) -> None:
        rng = np.random.default_rng(5)
        self.ctx = gg.Context()
        self.k, self.v, self.q = (
            self.ctx.from_numpy(rng.standard_normal((n_kv_heads, n, 16)).astype(np.float32))
            for n in (SIZE * 32, SIZE * 32, 3)
        )
        self.v_trans = self.ctx.from_numpy(self.v.numpy().swapaxes(1, 2).copy())

    def build(self, n: int) -> Graph:
        with gg.Context():
            k, v = (gg.view_3d(t, 16, n, t.ne[2], t.nb[1], t.nb[2], 0) for t in (self.k, self.v))
            kq = gg.soft_max_ext(gg.mul_mat(k, self.q), None, 0.25, 0.0)
            out = gg.mul_mat(gg.view_3d(self.v_trans, n, 16, k.ne[2], self.v_trans.nb[1], self.v_trans.nb[2], 0), kq)
            flash = gg.flash_attn_ext(self.q, k, v, None, 0.25)
            both = gg.concat(gg.cont(gg.permute(out, 0, 2, 1, 3)), flash, 3).set_output()
        return Graph().build_forward_expand(both)

    def expected(self, n: int) -> np.ndarray:
        k, v, q = (t.numpy().astype(np.float64) for t in (self.k, self.v, self.q))
        s = np.exp(np.einsum("htd,hkd->htk", q, k[:, :n]) * 0.25)
        return np.einsum("htk,hkd->thd", s / s.sum(-1, keepdims=True), v[:, :n])


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("n_kv_heads", [1, 4])
@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_every_size(n_threads: int, n_kv_heads: int, backend: str) -> None:
    """Also where the op splits its work, and needs its scratch memory, differently from size to size."""
    a, n = Attention(n_kv_heads), Var("n", SIZE * 32, lo=32)
    graph = a.build(n * 1)
    schedule = Scheduler((backend,), n_threads).alloc(graph)
    for size in (SIZE * 32, 32, 33, 100, 255, 256, 511, 512, 513, 777, 1024, 1500):
        n.bind(size)
        schedule.run()
        for got in graph.nodes[-1].numpy():
            np.testing.assert_allclose(got, a.expected(size), rtol=1e-5, atol=1e-6)


def test_every_size_across_backends() -> None:
    """What is copied at the borders of splits has the size of the run."""
    a, n = Attention(4), Var("n", SIZE * 32, lo=32)
    graph = a.build(n * 1)
    scheduler = Scheduler(("cpu", "ref"))
    scheduler.set_tensor_backend(next(t for t in graph.nodes if t.op == "soft_max"), "ref")
    schedule = scheduler.alloc(graph)
    assert len(schedule.splits) == 3
    for size in (SIZE * 32, 32, 777):
        n.bind(size)
        schedule.run()
        for got in graph.nodes[-1].numpy():
            np.testing.assert_allclose(got, a.expected(size), rtol=1e-5, atol=1e-6)


def test_results_have_the_size_of_the_run() -> None:
    n = Var("n", 8, lo=1)
    with gg.Context() as ctx:
        x = ctx.from_numpy(np.arange(16, dtype=np.float32).reshape(2, 8))
        y = gg.scale(gg.view_2d(x, n * 1, 2, x.nb[1], 0), 2.0).set_output()
    schedule = Scheduler(("cpu",)).alloc(Graph().build_forward_expand(y))
    for size in (8, 1, 5):
        n.bind(size)
        schedule.run()
        assert np.array_equal(y.numpy(), 2 * x.numpy()[:, :size])
        assert y.tobytes() == y.numpy().tobytes()


def test_a_cost_that_compares_sizes() -> None:
    """The cost of interpolate is that of its source or of its result, whichever is larger."""
    n = Var("n", 4, lo=1)
    with gg.Context() as ctx:
        x = ctx.from_numpy(np.arange(4, dtype=np.float32))
        y = gg.interpolate(gg.view_1d(x, n, 0), 2, 1, 1, 1, "nearest")
    schedule = Scheduler(("cpu",)).alloc(Graph().build_forward_expand(y))
    for size, want in (1, [0, 0]), (2, [0, 1]), (4, [0, 2]):
        n.bind(size)
        schedule.run()
        assert y.numpy().tolist() == want


def test_the_cost_of_what_is_set_in_place_is_its_own() -> None:
    n = Var("n", 4, lo=1)
    with gg.Context() as ctx:
        big, x = ctx.new_tensor(gg.F32, (64, 1000)), ctx.new_tensor(gg.F32, (64, 4))
        costs = [cost_ns(gg.set_inplace(big, gg.view_2d(x, 64, size, x.nb[1], 0), *big.nb[1:], 0)) for size in (4, n)]
    assert costs[0] == costs[1]


def test_a_var_that_is_bound_too_early() -> None:
    """What may not be above others must not be after these are bound, either: no run leaves a tensor."""
    n, x = Var("n", 10, lo=1), np.ones((10, 4), np.float32)
    head = Var("head", hi=10 - n)
    with gg.Context() as ctx:
        cache, rows = ctx.from_numpy(0 * x), ctx.from_numpy(x)
        y = gg.cpy(gg.view_2d(rows, 4, n, rows.nb[1], 0), cache[head : head + n])
    schedule = Scheduler(("cpu",)).alloc(Graph().build_forward_expand(y))
    n.bind(1)
    head.bind(9)
    schedule.run()
    n.bind(10)
    with pytest.raises(gg.GraphError, match="head = 9 is above 10 - n = 0"):
        schedule.run()
    head.bind(0)
    schedule.run()
    assert cache.numpy().all()


def test_the_work_of_each_step_follows_the_size() -> None:
    a, n = Attention(4), Var("n", SIZE * 32, lo=32)
    schedule = Scheduler(("cpu",), 1).alloc(a.build(n * 1))
    for size in (SIZE * 32, 32, 500):
        n.bind(size)
        alone = Scheduler(("cpu",), 1).alloc(a.build(size))
        for p, q in zip(schedule.programs, alone.programs, strict=True):
            assert isinstance(p, CpuProgram) and isinstance(q, CpuProgram)
            np.testing.assert_allclose(p.work_now(), q.work_now(), rtol=1e-9)


@pytest.mark.parametrize(
    "build",
    [
        lambda t, n: gg.view_1d(t, n - n % 4, 0),
        lambda t, n: gg.scale(t, float(n)),
        lambda t, n: gg.scale(t, 1 / n),
        lambda t, n: gg.scale(t, n),
        lambda t, n: t * n,
        lambda t, n: t if n < 30 else gg.silu(t),
        lambda t, n: gg.add(gg.view_1d(t, n, 0), gg.view_1d(t, 4, 0)),
    ],
    ids=["steps", "float", "quotient", "parameter", "factor", "another graph", "shapes"],
)
def test_what_is_not_the_same_for_every_value_is_refused(build: Callable[[Tensor, int], Tensor]) -> None:
    t = gg.Context().from_numpy(np.arange(4000, dtype=np.float32))
    with gg.Context(), pytest.raises(Varies, match=r"n \(8\.\.49\)|n follows from a Var"):
        build(t, Var("n", 49, lo=8) * 1)


def test_sizes_are_compared_for_every_value() -> None:
    n = Var("n", 10, lo=2)
    size = 3 * n + 6
    assert isinstance(size, Size) and int(size) == 12 and largest(size) == 36
    assert size > 11 and size < 37 and size >= 12 and not size > 36 and size > n * 2
    assert size == 3 * n + 6 and size != 36 and size != 3 * Var("n", 10, lo=2) + 6
    assert size - 3 * n == 6 and not isinstance(size - 3 * n, Size)
    assert (size % 3, size // 3) == (0, n + 2) and (100 - size) + size == 100
    for undecided in (
        lambda: size < 20,
        lambda: size >= 20,
        lambda: max(20, size),
        lambda: size > n * 4,
        lambda: len([0] * size),
    ):
        with pytest.raises(Varies):
            undecided()


def test_a_backend_that_takes_numbers_alone_is_known() -> None:
    class Other(RefBackend):
        varies = False

    assert Scheduler(("cpu", "ref")).varies and not Scheduler(("cpu", Other())).varies


# -- from Python ------------------------------------------------------------------------------------------------------


class Scores:
    """A row of scores for each of n rows of x, of which k are looked at through a mask."""

    def __init__(self) -> None:
        self.n, self.k = Var("n", 64), Var("k", 16, lo=2)
        self.ctx = gg.Context()
        self.w = np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
        self.x = self.ctx.new_tensor(gg.F32, (8, self.n), "x").set_input()
        self.mask = self.ctx.new_tensor(gg.F32, (self.k, self.n), "mask").set_input()
        scores = (self.x @ self.ctx.from_numpy(self.w).T)[:, : self.k]
        self.y = gg.soft_max_ext(gg.cont(scores), self.mask, 1.0, 0.0).set_output()
        self.graph = Graph().build_forward_expand(self.y)

    def inputs(self, n: int, k: int) -> dict[Tensor | str, np.ndarray]:
        rng = np.random.default_rng(n)
        mask = np.where(rng.integers(0, 2, (n, k)), 0, -np.inf)
        mask[:, 0] = 0
        return {"x": rng.standard_normal((n, 8)).astype(np.float32), self.mask: mask}

    def expected(self, inputs: dict[Tensor | str, np.ndarray]) -> np.ndarray:
        x, mask = inputs.values()
        e = np.exp((x @ self.w.T)[:, : mask.shape[1]] + mask)
        return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_the_shapes_of_inputs_bind_vars(backend: str) -> None:
    s = Scores()
    for n, k in ((3, 16), (64, 2), (1, 7), (64, 16)):
        inputs = s.inputs(n, k)
        gg.compute(s.graph, inputs, backend=backend)
        assert (s.n.value, s.k.value) == (n, k)
        np.testing.assert_allclose(s.y.numpy(), s.expected(inputs), rtol=1e-5, atol=1e-6)
    inputs = s.inputs(5, 4)
    got = gg.eval(s.y, inputs=inputs, backend=backend)
    np.testing.assert_allclose(got, s.expected(inputs), rtol=1e-5, atol=1e-6)


def test_inputs_that_fit_no_value() -> None:
    s = Scores()
    gg.compute(s.graph, s.inputs(3, 4))
    before, y = (s.n.value, s.k.value), s.y.numpy().copy()
    a, b = s.inputs(3, 4), s.inputs(5, 4)
    wrong: list[tuple[dict[Tensor | str, np.ndarray], str]] = [
        (
            s.inputs(65, 4),
            r"inputs: a value of shape \(65, 8\) does not fit x: F32 ne \[8, n, 1, 1\] for any n in 1\.\.64",
        ),
        (s.inputs(3, 1), r"for any k in 2\.\.16"),
        ({"x": a["x"], s.mask: b[s.mask]}, r"n is 3 for x: .*, and 5 for mask: "),
        (
            {"x": a["x"][:, :7], s.mask: a[s.mask]},
            r"set: shape \(3, 7\) is not \(3, 8\), the shape of x: .* with n = 3",
        ),
        ({"x": np.zeros((2, 3, 8)), s.mask: a[s.mask]}, r"set: shape \(2, 3, 8\) is not"),
    ]
    for inputs, text in wrong:
        with pytest.raises(gg.ShapeError, match=text):
            gg.compute(s.graph, inputs)
        assert (s.n.value, s.k.value) == before
    with pytest.raises(gg.GraphError, match=r"mask: .* was set for k = 4, n = 3"):
        gg.compute(s.graph, {"x": b["x"]})
    assert (s.n.value, s.k.value) == before and np.array_equal(s.y.numpy(), y)


def test_values_of_another_size_are_not_read() -> None:
    s = Scores()
    gg.compute(s.graph, s.inputs(3, 4))
    s.n.bind(5)
    for t, text in (
        (s.y, "holds values for .*n = 3.*: compute it again"),
        (s.x, r"holds values for n = 3.*: set\(\) it"),
    ):
        with pytest.raises(gg.AllocError, match=text):
            t.numpy()
    with pytest.raises(gg.GraphError, match=r"was set for n = 3, and is another size now: n = 5"):
        gg.compute(s.graph)
    s.n.bind(3)
    assert s.y.numpy().shape == (3, 4) and s.x.numpy().shape == (3, 8)
    s.x.set(np.zeros((3, 8)))
    with pytest.raises(gg.ShapeError, match=r"shape \(5, 8\) is not \(3, 8\), the shape of x: .* with n = 3"):
        s.x.set(np.zeros((5, 8)))
    s.n.bind(5)
    with pytest.raises(gg.GraphError, match="was set for"):
        Scheduler(("cpu",)).compute(s.graph)


def test_nothing_is_built_again() -> None:
    s = Scores()
    scheduler = Scheduler(("cpu",))
    s.n.bind(1)
    schedule, made = scheduler.alloc(s.graph), len(s.ctx.tensors)
    (program,) = schedule.programs
    assert isinstance(program, CpuProgram)
    size, records = scheduler.buffer_size("cpu"), program.lowered
    for n, k in ((2, 3), (64, 16), (7, 7)):
        s.n.bind(n)
        s.k.bind(k)
        for key, value in (inputs := s.inputs(n, k)).items():
            (s.x if key == "x" else s.mask).set(value)
        scheduler.compute(s.graph)
        np.testing.assert_allclose(s.y.numpy(), s.expected(inputs), rtol=1e-5, atol=1e-6)
        assert scheduler.alloc(s.graph) is schedule and schedule.programs == [program] and program.lowered is records
    assert scheduler.buffer_size("cpu") == size and len(s.ctx.tensors) == made


def test_scratch_memory_of_sizes_in_between() -> None:
    """Threads that share the tiles of attention keep the scores of all: fewer rows than it is planned for need more."""
    n = Var("n", 2048, lo=1)
    rng = np.random.default_rng(0)
    with gg.Context() as ctx:
        q = ctx.new_tensor(gg.F32, (8, n), "q")
        k = ctx.from_numpy(rng.standard_normal((2048, 8)).astype(np.float32))
    backend = CpuBackend(2)
    graph = Graph().build_forward_expand(gg.flash_attn_ext(q, k, k, None, 0.3).set_output())
    scheduler = Scheduler((backend,))
    (program,) = scheduler.alloc(graph).programs
    assert isinstance(program, CpuProgram)
    sizes, asked = list[int](), list[int]()
    for size in (1, 2048, 80, 40, 3):  # a tile is 8 to 32 rows: 80 or 40 are three to seven
        n.bind(size)
        q.set(np.ones((size, 8)))
        scheduler.compute(graph)
        sizes.append(backend.work(0).size)
        asked.append(program.lowered.work_sizes()[-1])
        fixed = gg.flash_attn_ext(ctx.from_numpy(np.ones((size, 8), np.float32)), k, k, None, 0.3)
        assert np.array_equal(graph.nodes[-1].elements(), gg.eval(fixed.reshape(1, size, 1, 8), n_threads=1))
    assert sizes[1] == program.lowered.work_size < sizes[3] == sizes[4]
    assert asked[1] < max(asked) == sizes[3] > asked[4] > 0  # pg_task.work_size is of the sizes of the run


def test_stores_that_may_overlap() -> None:
    cache = gg.Context().from_numpy(np.zeros((16, 4), np.float32))
    head, n = Var("head", 12, lo=4), Var("n", 4)
    for apart in (cache[head - 4 : head], cache[head + 4 :][:1] if head.hi < 11 else cache[:4]):
        gg.cpy(apart, cache[head : head + apart.ne[1]])
    gg.cpy(cache[: n * 1], cache[4 : n + 4])
    for near in (cache[head - 1 : head + 3], cache[: head + 1][:5], cache[head - n : head - n + 4]):
        with pytest.raises(gg.ShapeError, match="shares bytes"):
            gg.cpy(gg.reshape_1d(near, 16) if near.ne[1] == 4 else near[1:], cache[head : head + 4])
    x = gg.Context().new_tensor(gg.F32, (n, 4), "x")
    gg.cpy(x[0], x[1])
    gg.add_inplace(x, x)
    with pytest.raises(gg.ShapeError, match="whose elements share bytes"):
        gg.scale_inplace(gg.view_2d(cache, 4, n, 4 * n, 0), 2.0)


def test_a_function_of_python_sees_the_size_of_the_run() -> None:
    n = Var("n", 9)
    x = gg.Context().new_tensor(gg.F32, (4, n), "x")
    y = gg.map_custom(lambda dst, a: np.copyto(dst, a[::-1]), x)
    graph = Graph().build_forward_expand(gg.cast(y, gg.F16) + 1)
    for backend in ("cpu", "ref"):
        for size in (3, 9, 1):
            a = np.arange(4 * size, dtype=np.float32).reshape(size, 4)
            gg.compute(graph, {x: a}, backend=backend)
            assert np.array_equal(graph.nodes[-1].numpy(), a[::-1] + 1)


def test_a_backend_without_vars_says_so() -> None:
    class Plain(RefBackend):
        name, varies = "plain", False

    n = Var("n", 9)
    ctx = gg.Context()
    x = ctx.new_tensor(gg.F32, (4, n), "x")
    scheduler = Scheduler([Plain()])
    with pytest.raises(gg.BackendError, match=r"the backend plain does not run(.|\n)*x: F32 ne \[4, n, 1, 1\]"):
        scheduler.alloc(Graph().build_forward_expand(x * 2))
    head = gg.cont(ctx.from_numpy(np.arange(8, dtype=np.float32))[Var("head", 7, 3) :][:1])  # an offset is none
    scheduler.compute(Graph().build_forward_expand(head))


def test_a_fusion_whose_rule_depends_on_a_var_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def find(g: Nodes, t: Tensor) -> Step | None:
        asked.append(t.op)
        return Step((t,)) if t.ne[0] > 4 else None

    monkeypatch.setattr("pyggml.backends.cpu.fuse.ORDER", (Fusion("long", ("silu",), find),))
    x = gg.Context().new_tensor(gg.F32, (Var("n", 9), 4), "x")
    graph = Graph().build_forward_expand(gg.silu(x))
    gg.compute(graph, {x: np.zeros((4, 3))})
    assert asked == ["silu"] and not graph.nodes[-1].numpy().any()
