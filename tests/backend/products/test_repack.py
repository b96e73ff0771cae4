"""Repacked weights (R16): every type, instruction set and way of computing against float64, the copies, and what
replaces what. What is special about many columns is in test_repack_gemm.py.
"""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pyggml as gg
from pyggml.backends.cpu import CpuBackend, isa_levels
from pyggml.backends.cpu.lower import lower
from pyggml.backends.cpu.repack import be_fast, can_repack, repack, repack_in_passing
from pyggml.backends.ref import compute_node
from pyggml.buffers.alloc import steps_of
from pyggml.buffers.buffer import Buffer
from pyggml.testing.harness import check_guards, fill, gaussian, nmse, place

TYPES = [t for t in gg.DType if t.is_quantized and t.name not in ("Q8_1", "Q8_K", "Q1_0")]  # which no kernel reads
# Where a block's f16 d and m are; IQ1_M keeps d in the top nibbles of four words.
HEADS = {
    gg.Q2_K: (80, 82), gg.Q3_K: (108,), gg.Q6_K: (208,), gg.MXFP4: (), gg.NVFP4: (), gg.TQ1_0: (52,), gg.TQ2_0: (64,),
    gg.Q4_1: (0, 2), gg.Q5_1: (0, 2), gg.Q4_K: (0, 2), gg.Q5_K: (0, 2), gg.IQ1_M: (),
}  # fmt: skip
ISAS = [isa for isa in isa_levels() if isa not in ("generic", "avx512")]  # the levels with kernels of their own
AMD = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()


# The types with minima, and where a block holds its codes: w = scale * code + shift.
WITH_MINIMA = {
    gg.Q4_1: slice(4, 20),
    gg.Q5_1: slice(4, 24),
    gg.Q2_K: slice(16, 80),
    gg.Q4_K: slice(16, 144),
    gg.Q5_K: slice(16, 176),
}


@lru_cache(maxsize=1)
def decoded(a: gg.Tensor) -> np.ndarray:
    """Weights in float64. Many products share them."""
    return a.elements().astype(np.float64)


@lru_cache(maxsize=1)
def terms(a: gg.Tensor) -> np.ndarray:
    """For each weight the sizes of what sums add up for it: |w|, or |scale * code| + |shift|."""
    w = decoded(a)
    if a.dtype not in WITH_MINIMA:
        return np.abs(w)
    raw = np.array(a.raw()).reshape(-1, a.dtype.type_size)
    raw[:, WITH_MINIMA[a.dtype]] = 0
    shift = gg.dequantize(raw.tobytes(), a.dtype, a.ne[::-1]).astype(np.float64)
    return np.abs(w - shift) + np.abs(shift)


def steps_in(x: np.ndarray) -> np.ndarray:
    """The step of each element's run of 256 (csrc/products/r16/sums.h): its integers are at most 32512, and their norm
    in each half at most 46300."""
    steps = np.empty_like(x)
    for i in range(0, x.shape[-1], 256):
        run = np.abs(x[..., i : i + 256])
        norms = [np.sqrt((half**2).sum(-1)) for half in (run[..., :128], run[..., 128:])]
        steps[..., i : i + 256] = np.maximum(np.maximum(*norms) / 46300, run.max(-1) / 32512)[..., None]
    return steps


def check(got: np.ndarray, y: gg.Tensor, want: np.ndarray) -> None:
    """Assert that a product `got` is as good as its way of computing promises, result by result.

    Weights are exact, and an element of x is off by half a step at most, evenly spread: 1/12 of a squared step. Then
    f32 sums: 8 to 32 terms of a run, and a total of the runs.
    """
    got, want = got.astype(np.float64), want.astype(np.float64)
    weights, *others = (t for t in y.src if t is not None)
    a, size = decoded(weights), terms(weights)
    b, *rest = (t.elements().astype(np.float64) for t in others)
    if rest:  # mul_mat_id: the matrix and the column of each result
        ids = rest[0][0, 0].astype(int)
        w, x = a[0][ids], np.tile(b[0], (1, ids.shape[1] // b.shape[2], 1))[:, :, None]
        got, want, size = got[0][:, :, None], want[0][:, :, None], size[0][ids]
    else:
        w, x = a, b
    step = steps_in(x)
    bound = 0.501 * step @ np.abs(w).swapaxes(-1, -2) + 2.0**-19 * np.abs(x) @ size.swapaxes(-1, -2) + 1e-30
    assert (np.abs(got - want) <= bound).all()
    if got.size < 200:
        return
    squares = (w**2).sum(-1)[..., None, :] / w.shape[-1]  # of results with random signs: x's square times this
    error = ((got - want) ** 2).sum() / (squares * (x**2).sum(-1)[..., None]).sum()
    spread = (squares * (step**2).sum(-1)[..., None]).sum() / (squares * (x**2).sum(-1)[..., None]).sum() / 12
    sure = 3 if y.ne[1] * y.ne[2] > 30 else 16  # rows may be alike, so only columns are sure to differ
    assert error <= sure * spread + 1e-12


def source(dtype: gg.DType, values: np.ndarray) -> gg.Tensor:
    """A tensor of `values` (NumPy order) in guarded memory."""
    t = gg.Context().new_tensor(dtype, values.shape[::-1])
    place(t)
    fill(t, values.reshape(t.ne[::-1]))
    return t


def run(y: gg.Tensor, isa: str, n_threads: int) -> np.ndarray:
    """The node `y`, computed in guarded memory."""
    place(y)
    CpuBackend(n_threads, isa).compile(steps_of([y]), lambda s: s).run()
    for t in (y, *y.src):
        if t is not None and t.view_src is None:
            check_guards(t)
    return np.array(y.elements())


def reference(y: gg.Tensor) -> np.ndarray:
    place(y)
    compute_node(y)
    return np.array(y.elements())


def symbols(y: gg.Tensor, isa: str) -> int:
    """The address of the kernel that computes y."""
    return int(lower(steps_of([y]), lambda s: s, isa, 1).ops[:8].view(np.uint64)[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TYPES)
def test_products(dtype: gg.DType, isa: str) -> None:
    """All column counts around the borders of tiles and of the two ways; parts of row groups; several super-blocks."""
    rng = np.random.default_rng(dtype.gguf_id)
    for k, m in ((dtype.block_size, 1), (3 * dtype.block_size, 16), (256 + 2 * dtype.block_size, 70)):
        w = source(dtype, gaussian(rng, (m, k)))
        assert repack([w], isa=isa) == 1
        for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 15, 16, 17, 24, 25, 29, 31, 32, 33, 49, 70):
            y = gg.mul_mat(w, source(gg.F32, gaussian(rng, (n, k))))
            want = reference(y)
            one, two = run(y, isa, 1), run(y, isa, 2)
            check(two, y, want)
            assert np.array_equal(one, two), "the number of threads changed the result"


def any_blocks(dtype: gg.DType, rng: np.random.Generator, greatest: bool, d: Callable[[int], np.ndarray]) -> gg.Tensor:
    """48 rows of 512 with any codes and sub-scales, as no quantiser writes them, or the greatest ones only, and the d
    and m of d(number of blocks)."""
    w = source(dtype, np.zeros((48, 512)))
    blocks = w.raw().reshape(-1, dtype.type_size)
    top = 127 if dtype is gg.Q8_0 else 255
    blocks[...] = top if greatest else rng.integers(0, 256, blocks.shape)
    for at in HEADS.get(dtype, (0,)):
        blocks[:, at : at + 2] = d(len(blocks)).astype(np.float16).view(np.uint8).reshape(-1, 2)
    if dtype is gg.IQ1_M:
        bits = d(len(blocks)).astype(np.float16).view(np.uint16)[:, None]
        words = blocks[:, 48:].copy().view(np.uint16)
        blocks[:, 48:] = (words & 0xFFF | bits >> np.arange(0, 16, 4, np.uint16) << 12).view(np.uint8)
    if dtype is gg.MXFP4:
        blocks[:, 0] = rng.integers(120, 130, len(blocks))
    return w


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TYPES)
def test_any_bytes(dtype: gg.DType, isa: str) -> None:
    """Codes and sub-scales of all values, and the greatest only; d and m of similar size, subnormal, and 0."""
    rng = np.random.default_rng(dtype.gguf_id + 100)
    heads: list[Callable[[int], np.ndarray]] = [
        lambda n: rng.uniform(-1, 1, n),
        lambda n: rng.integers(-9, 10, n) * 2.0**-24,
        lambda n: np.where(rng.random(n) < 0.3, 0, rng.uniform(0.5, 1, n)),
    ]
    for d in heads:
        for greatest in (False, True):
            w = any_blocks(dtype, rng, greatest, d)
            assert repack([w], isa=isa) == 1
            for n in (1, 7, 33, 48):
                y = gg.mul_mat(w, source(gg.F32, gaussian(rng, (n, 512))))
                want = reference(y)
                check(run(y, isa, 2), y, want)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TYPES)
def test_greatest_sums(dtype: gg.DType, isa: str) -> None:
    """The greatest codes times columns whose integers all have the same extreme bytes (integers.h): sums of 16 bits
    hold them."""
    w = any_blocks(dtype, np.random.default_rng(5), True, np.ones)
    assert repack([w], isa=isa) == 1
    for q in (127 * 256 - 128, 126 * 256 + 127, 127 * 256):
        for n in (1, 2):
            x = np.full((n, 512), q / (127 * 256))
            x[:, ::32] = 1
            for sign in (1, -1):
                y = gg.mul_mat(w, source(gg.F32, sign * x))
                check(run(y, isa, 1), y, reference(y))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [1, 3])
def test_extremes(isa: str, n: int) -> None:
    """The smallest weight code, zero blocks, tiny and huge columns, the smallest and large exponents of MXFP4."""
    rng = np.random.default_rng(3)
    x = gaussian(rng, (n, 128))
    x[:, 32:64] = 0
    half = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    cases = []
    for codes in (np.full(32, 0x80), np.full(32, 0x7F), rng.integers(0, 256, 32)):
        w = source(gg.Q8_0, np.zeros((20, 128)))
        w.raw().reshape(-1, 34)[...] = [*half, *codes]
        w.raw().reshape(-1, 34)[::3] = 0
        cases.append(w)
    for exponent in (0, 1, 2, 127, 190):
        w = source(gg.MXFP4, np.zeros((20, 128)))
        w.raw()[...] = rng.integers(0, 256, w.nbytes)
        w.raw().reshape(-1, 17)[:, 0] = exponent
        cases.append(w)
    assert repack(cases, isa=isa) == len(cases)
    for w in cases:
        for scale in (1.0, 1e-20, 1e6):
            y = gg.mul_mat(w, source(gg.F32, x * scale))
            want = reference(y)
            check(run(y, isa, 1), y, want)


@pytest.mark.parametrize("isa", ISAS)
def test_not_finite(isa: str) -> None:
    """NaN and infinities in a column make that column NaN, and no other."""
    rng = np.random.default_rng(4)
    w = source(gg.Q4_K, gaussian(rng, (40, 512)))
    assert repack([w], isa=isa) == 1
    x = gaussian(rng, (4, 512))
    before = run(gg.mul_mat(w, source(gg.F32, x)), isa, 2)[0, 0]
    for i, bad in enumerate((np.nan, np.inf, -np.inf)):
        x[i, 100 * i + 7] = bad
    after = run(gg.mul_mat(w, source(gg.F32, x)), isa, 2)[0, 0]
    assert np.isnan(after[:3]).all() and np.array_equal(after[3], before[3])


@st.composite
def id_cases(draw: st.DrawFn) -> tuple[gg.DType, int, int, int, int, int, int, int]:
    dtype = draw(st.sampled_from(TYPES))
    n_used = draw(st.integers(1, 4))
    n_b = draw(st.sampled_from([i for i in range(1, n_used + 1) if n_used % i == 0]))
    n_tokens = draw(st.integers(1, 3) | st.integers(4, 90))
    k = dtype.block_size * draw(st.integers(1, 3))
    return dtype, k, draw(st.integers(1, 70)), draw(st.integers(1, 8)), n_used, n_b, n_tokens, draw(st.integers(0, 99))


@pytest.mark.parametrize("isa", ISAS)
def test_experts(isa: str) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
    @given(id_cases(), st.sampled_from([1, 2]))
    def check_experts(case: tuple[gg.DType, int, int, int, int, int, int, int], n_threads: int) -> None:
        dtype, k, m, n_expert, n_used, n_b, n_tokens, seed = case
        rng = np.random.default_rng(seed)
        w = source(dtype, gaussian(rng, (n_expert, m, k)))
        assert repack([w], isa=isa) == 1
        ids = source(gg.I32, rng.integers(0, n_expert, (n_tokens, n_used)))
        y = gg.mul_mat_id(w, source(gg.F32, gaussian(rng, (n_tokens, n_b, k))), ids)
        want = reference(y)
        check(run(y, isa, n_threads), y, want)

    check_experts()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("form", [repack, repack_in_passing, be_fast])
def test_stacks(form: Callable[..., object], isa: str) -> None:
    """mul_mat of a stack: each column has the bits that its matrix gives it alone, whichever other columns and matrices
    there are, and for more threads than matrices, too."""
    rng = np.random.default_rng(6)
    for dtype in (gg.Q5_0, gg.Q4_K, gg.Q8_0):
        k, m, n_matrices = 2 * dtype.block_size, 37, 3
        values = gaussian(rng, (n_matrices, m, k))
        stack, *matrices = source(dtype, values), *(source(dtype, v) for v in values)
        if form is be_fast:
            repack([stack, *matrices], isa=isa)
        form([stack, *matrices])
        for b3, b2, n in ((1, 3, 1), (1, 6, 5), (2, 3, 7), (2, 6, 40)):
            x = gaussian(rng, (b3, b2, n, k))
            y = gg.mul_mat(stack, source(gg.F32, x))
            want = reference(y)
            for n_threads in (1, 2, 5):
                got = run(y, isa, n_threads)
                assert nmse(got, want) < (1e-3 if form is be_fast else 3e-8)  # columns with outliers, short rows
                if form is be_fast and isa == "amx" and n == 40:  # many columns are rounded to bf16, few are exact
                    continue
                for i2 in range(b2):
                    matrix = matrices[i2 // (b2 // n_matrices)]
                    alone = run(gg.mul_mat(matrix, source(gg.F32, x[b3 - 1, i2, :1])), isa, 1)
                    assert np.array_equal(got[b3 - 1, i2, 0], alone[0, 0, 0])


def test_scratch_of_stacks() -> None:
    """It is that of one matrix for each thread, not of all."""
    x = source(gg.F32, np.zeros((64, 512, 512)))
    stack, matrix = (source(gg.Q8_0, np.zeros((n, 128, 512))) for n in (64, 1))
    repack_in_passing([stack, matrix])
    alone = gg.mul_mat(matrix, source(gg.F32, np.zeros((512, 512))))
    both = gg.mul_mat(stack, x), alone
    for y in both:
        place(y)
    sizes = [lower(steps_of([y]), lambda t: t, ISAS[-1], 2).work_size for y in both]
    assert sizes[0] < 3 * sizes[1]


@pytest.mark.parametrize("isa", ISAS)
def test_expert_out_of_range(isa: str) -> None:
    w = source(gg.Q4_0, np.ones((3, 8, 32)))
    assert repack([w], isa=isa) == 1
    y = gg.mul_mat_id(w, source(gg.F32, np.ones((1, 1, 32))), source(gg.I32, np.array([[3]])))
    with pytest.raises(gg.BackendError, match="row index 3 is out of range"):
        run(y, isa, 2)


@pytest.mark.parametrize("dtype", [gg.F32, gg.F16, gg.BF16])
def test_columns_of_any_layout(dtype: gg.DType) -> None:
    rng = np.random.default_rng(6)
    w = source(gg.Q5_K, rng.standard_normal((33, 512)))
    repack([w])
    b = source(dtype, rng.standard_normal((2, 1, 3, 512)))
    for view in (b, gg.permute(b, 0, 2, 1, 3), gg.permute(b, 0, 3, 2, 1)):
        y = gg.mul_mat(w, view)
        want = reference(y)
        check(run(y, ISAS[-1], 2), y, want)


def test_who_reads_the_copy() -> None:
    """Products of the tensor itself do; views of it, other ops and levels without such kernels read the tensor."""
    rng = np.random.default_rng(7)
    w = source(gg.Q4_0, rng.standard_normal((32, 64)))
    x = source(gg.F32, rng.standard_normal((1, 64)))
    y = gg.mul_mat(w, x)
    place(y)
    before = {isa: symbols(y, isa) for isa in isa_levels()}
    assert w.form.copy is None and repack([w]) == 1
    copy = w.form.copy
    assert copy is not None and copy.buft == "CPU_REPACK" and copy.base % 64 == 0
    assert repack([w]) == 0 and w.form.copy is copy, "a copy that plans point to was replaced"
    for isa in isa_levels():
        assert (symbols(y, isa) == before[isa]) == (isa == "generic")
    view = gg.mul_mat(gg.view_2d(w, 64, 16, w.nb[1], 0), x)
    want = reference(view)
    assert nmse(run(view, ISAS[-1], 1), want) < 1e-12
    rows = gg.get_rows(w, source(gg.I32, np.array([3])))
    assert np.array_equal(run(rows, ISAS[-1], 1), reference(rows))
    del y, view, rows, w
    gc.collect()


def test_what_has_no_copy() -> None:
    ctx = gg.Context()

    def tensor(dtype: gg.DType, *ne: int) -> gg.Tensor:
        t = ctx.new_tensor(dtype, ne)
        place(t)
        return t

    stored = tensor(gg.Q4_0, 64, 32)
    for t in (
        tensor(gg.F32, 64, 32),
        tensor(gg.F16, 64, 32),
        tensor(gg.Q4_0, 64, 2, 2, 2),
        gg.view_2d(stored, 32, 32, stored.nb[1], 0),
    ):
        assert not can_repack(ISAS[-1], t) and repack([t]) == 0 and t.form.copy is None
    assert can_repack(ISAS[0], stored) and not can_repack("generic", stored)
    with pytest.raises(gg.BackendError, match="n_threads"):
        repack([stored], n_threads=0)
    with pytest.raises(gg.BackendError, match="altivec"):
        repack([stored], isa="altivec")


def test_progress_and_cancelling() -> None:
    tensors = [source(gg.Q8_0, np.ones((32, 64))) for _ in range(4)]
    seen: list[float] = []

    def until_half(done: float) -> None:
        seen.append(done)
        if done >= 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        repack(tensors, until_half)
    assert seen == [0.0, 0.25, 0.5] and [t.form.copy is not None for t in tensors] == [True, True, False, False]
    assert repack(tensors) == 2


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_threads_pack_the_same(n_threads: int) -> None:
    """A matrix of several chunks, whose last group is not full: the same bytes from any number of threads."""
    values = np.random.default_rng(8).standard_normal((1030, 2048))
    a, b = source(gg.Q4_0, values), source(gg.Q4_0, values)
    repack([a], n_threads=1)
    repack([b], n_threads=n_threads)
    one, two = a.form.copy, b.form.copy
    assert one is not None and two is not None and np.array_equal(one.memory, two.memory)
    assert one.size == -(-1030 // 16) * 64 * 288


def resident(memory: np.ndarray) -> int:
    """Pages of a mapped file that this process has in memory."""
    address = memory.__array_interface__["data"][0]
    with open("/proc/self/smaps") as f:
        inside = False
        for line in f:
            head = line.split()[0]
            if "-" in head and not head.endswith(":"):
                first, last = (int(x, 16) for x in head.split("-"))
                inside = first <= address < last
            elif inside and head == "Rss:":
                return int(line.split()[1]) * 1024
    return 0


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs Linux's /proc")
def test_pages_are_given_back(tmp_path: Path) -> None:
    """The whole pages of a repacked tensor leave memory, its neighbours stay, and its bytes are still there to read."""
    nbytes = 4096 * 18 * 16
    data = np.random.default_rng(9).integers(0, 60, nbytes + 8192, dtype=np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(data.tobytes())
    with open(path, "rb") as f:
        mapped = np.frombuffer(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    t = gg.Context().new_tensor(gg.Q4_0, (1024, nbytes // 576))
    t.buffer, t.offset = Buffer(mapped, "CPU_MMAP"), 4096 + 64
    assert int(mapped.sum(dtype=np.int64)) == int(data.sum(dtype=np.int64))
    assert resident(mapped) >= nbytes
    assert repack([t]) == 1
    assert resident(mapped) <= 8 * 4096
    assert np.array_equal(mapped, data)
