"""Scratch memory: what a kernel asks for on so many threads must do on fewer. Workers may be late or rest, and then an
op is computed by fewer threads than it was planned for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.backends.cpu.backend import CpuProgram, Spans
from pyggml.backends.cpu.isa import Kernel, kernel_of, table_of
from pyggml.backends.cpu.lower import lower
from pyggml.backends.cpu.record import Record
from pyggml.buffers.alloc import Step, steps_of
from pyggml.buffers.buffer import Buffer
from pyggml.native import ffi, lib
from pyggml.opdef import OPS
from pyggml.tensor import Tensor
from pyggml.testing import STRATEGIES, Case
from pyggml.testing.harness import FILL
from pyggml.testing.search import search

from ..test_attention import steps_for

MOST = 8  # threads
BEYOND = 1 << 20  # bytes behind scratch memory that nobody may write to
# Kernels for an op; those of products read the same sources.
WAYS = ("", "_r16", "_stored", "_r16_fast", "_stored_fast", "_half", "_exact")
FUSED = {"attn_vt", "conv_state"}  # kernels that no op has


def has_scratch(stem: str | None) -> bool:
    return any(k.row.work != ffi.NULL for isa in isa_levels() for _, k in table_of(isa).get(stem or "", ()))


def ways_of(t: Tensor) -> list[str]:
    """The kernels that may compute `t`: those of `WAYS` that know the type of its weights."""
    a = t.src[0] if t.src else None
    repacked = a is not None and lib.pg_r16_bytes(a.dtype.gguf_id, a.ne[0], a.ne[1]) > 0
    return [way for way in WAYS if repacked or way.split("_")[1:2] not in (["r16"], ["stored"])]


def check_scratch(steps: list[Step], isa: str) -> Iterator[str]:
    """Check what the kernels for `steps` ask for. Yields the stems of these kernels."""
    for t in {t.root for s in steps for n in s.nodes for t in (n, *n.src) if t is not None}:
        t.buffer = Buffer(np.empty(0, np.uint8))
        t.buffer.base = 1 << 40  # nothing is computed
    low = lower(steps, lambda t: t, isa, MOST)
    ops = ffi.cast("pg_op *", low.ops.__array_interface__["data"][0])
    step_of = {s.nodes[-1]: s for s in steps}
    for i, t in enumerate(low.nodes):
        r = step_of[t].match
        fused = r.kernel if isinstance(r, Record) else None
        kernels: list[Kernel | None] = [fused] if fused else [kernel_of(isa, t, way) for way in ways_of(t)]
        for k in kernels:
            if k is None or k.row.work == ffi.NULL:
                continue
            task = ffi.addressof(ops[i].task)
            asked = [lib.pg_work_size(k.row, task, n) for n in range(1, MOST + 1)]
            assert asked == sorted(asked), f"{k.symbol} asks for {asked} bytes on 1 .. {MOST} threads: {t.describe()}"
            yield ffi.string(k.row.op).decode()


def sizes_of(t: Tensor, isa: str) -> Iterator[tuple[str, int]]:
    """What each kernel that may compute a node asks for, on all threads."""
    for s in (t, *t.src):
        if s is not None:
            s.buffer = Buffer(np.empty(0, np.uint8))
            s.buffer.base = 1 << 40
    low = lower(steps_of([t]), lambda t: t, isa, MOST)
    task = ffi.addressof(ffi.cast("pg_op *", low.ops.__array_interface__["data"][0])[0].task)
    for way in ways_of(t):
        k = kernel_of(isa, t, way)
        if k is not None and k.row.work != ffi.NULL:
            yield way, lib.pg_work_size(k.row, task, MOST)


def products() -> list[Tensor]:
    """Of weights that have kernels of their own."""
    out: list[Tensor] = []
    with gg.Context() as ctx:
        for dtype in (gg.Q4_0, gg.F16, gg.BF16):
            a, x, y = (
                ctx.new_tensor(t, ne) for t, ne in ((dtype, (64, 32, 3)), (gg.F32, (64, 40)), (gg.F32, (40, 32)))
            )
            one, some = gg.view_2d(a, 64, 32, a.nb[1], 0), gg.reshape_3d(x, 64, 2, 20)
            ids = ctx.new_tensor(gg.I32, (2, 20))
            out += [gg.mul_mat(one, x), gg.mul_mat_id(a, some, ids), gg.out_prod(one, y)]
    return out


def test_more_threads_never_ask_for_less() -> None:
    seen = set[str]()

    def check_at_all_levels(t: Tensor) -> None:
        steps = steps_of(gg.Graph().build_forward_expand(t).nodes)
        for isa in isa_levels():
            seen.update(check_scratch(steps, isa))

    def check(case: Case) -> None:
        with gg.Context() as ctx:
            t = case.build(*[None if s is None else ctx.new_tensor(s.dtype, s.ne) for s in case.srcs])
        check_at_all_levels(t)

    for t in products():
        check_at_all_levels(t)
    for name in sorted(STRATEGIES):
        if any(has_scratch((OPS[name].kernel or "") + way) for way in WAYS):
            search(check, name, 5, STRATEGIES[name])
    assert {stem for isa in isa_levels() for stem in table_of(isa) if has_scratch(stem)} - FUSED == seen


def test_fewer_columns_never_ask_for_more() -> None:
    """What is planned for all columns must do for those of one expert, of which there may be any number."""
    for dtype in (gg.Q4_0, gg.Q8_0, gg.Q6_K, gg.IQ3_XXS):
        for isa in isa_levels():
            asked: dict[str, list[int]] = {}
            for n in (*range(1, 70, 3), 128, 300, 600):
                with gg.Context() as ctx:
                    a, x = ctx.new_tensor(dtype, (512, 64, 4)), ctx.new_tensor(gg.F32, (512, 1, n))
                    t = gg.mul_mat_id(a, x, ctx.new_tensor(gg.I32, (1, n)))
                for way, size in sizes_of(t, isa):
                    asked.setdefault(way, []).append(size)
            assert asked and all(sizes == sorted(sizes) for sizes in asked.values()), (dtype, isa, asked)


def attention(heads: int, n_kv: int, n_tokens: int, fused: bool, d: int = 8) -> list[Step]:
    with gg.Context() as ctx:
        q, k = ctx.new_tensor(gg.F32, (d, n_tokens, heads)), ctx.new_tensor(gg.F16, (d, n_kv, heads))
        if not fused:
            return steps_of([gg.flash_attn_ext(q, k, k, None, 0.25)])
        v = ctx.new_tensor(gg.F16, (n_kv, d, heads))
        y = gg.mul_mat(v, gg.soft_max_ext(gg.mul_mat(k, q), None, 0.25))
    return steps_for(CpuBackend(1, "generic", ("attention",)), gg.Graph().build_forward_expand(y))


@pytest.mark.parametrize("isa", isa_levels())
def test_attention_asks_for_no_less_when_tiles_are_few(isa: str) -> None:
    """Some numbers of threads share its tiles, and others do not: where those meet."""
    for fused, stem in ((False, "flash_attn_ext"), (True, "attn_vt")):
        for heads in range(1, 4 * MOST + 2):
            for n_kv, n_tokens in ((255, 1), (256, 1), (2048, 1), (256, 9), (2048, 9), (300, 40)):
                assert [*check_scratch(attention(heads, n_kv, n_tokens, fused), isa)] == [stem]


@pytest.mark.parametrize("isa", isa_levels())
def test_attention_on_fewer_threads_than_planned(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 tiles, planned for 4 threads, which do not share them; 3 threads do."""
    backend, memory, took = CpuBackend(1, isa, ()), Buffer.allocate(0), list[int]()
    backend.n_threads = 4

    def work(size: int) -> Buffer:
        nonlocal memory
        memory = Buffer.allocate(size + BEYOND)
        memory.memory[:] = FILL
        return Buffer(memory.memory[:size])

    def measure(_program: CpuProgram, spans: Spans) -> None:
        took.append(int((spans[0, :, 1] > 0).sum()))

    rng = np.random.default_rng(0)
    steps = attention(8, 4096, 1, False)
    (y,) = steps[0].nodes
    for t in (*y.src[:3], y):
        assert isinstance(t, Tensor)
        t.allocate()
        t.store(rng.standard_normal(t.ne[::-1]))
    monkeypatch.setattr(backend, "work", work)
    backend.measure = measure
    program = backend.compile(steps, lambda t: t)
    program.run(n_threads=1)
    want = y.tobytes()
    for _ in range(1000):  # until three have been awake
        program.run(n_threads=3)
        assert (memory.memory[-BEYOND:] == FILL).all()
        assert y.tobytes() == want
        if took[-1] == 3:
            break
