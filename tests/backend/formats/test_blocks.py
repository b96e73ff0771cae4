"""Block formats in C: against ggml's own bytes (shared/golden/quants.npz), against the gguf package's NumPy code as an
independent reference, and against themselves at every instruction set."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from pyggml import codec
from pyggml.backends.cpu import isa_levels
from pyggml.backends.quantize import dequantize, quantize
from pyggml.dtypes import DType
from pyggml.errors import BackendError, DTypeError, ShapeError
from pyggml.native import ffi, lib

Array = np.ndarray[Any, Any]

# NMSE of gaussian rows after a round trip: as measured, rounded up in the second digit.
NMSE = {
    "Q4_0": 7.3e-3, "Q4_1": 6.0e-3, "Q5_0": 1.8e-3, "Q5_1": 1.5e-3, "Q8_0": 2.8e-5,
    "Q2_K": 6.8e-2, "Q3_K": 2.1e-2, "Q4_K": 4.8e-3, "Q5_K": 1.2e-3, "Q6_K": 2.8e-4,
    "IQ1_S": 0.21, "IQ1_M": 0.18, "IQ2_XXS": 0.11, "IQ2_XS": 8.0e-2, "IQ2_S": 5.7e-2,
    "IQ3_XXS": 3.1e-2, "IQ3_S": 1.7e-2, "IQ4_NL": 5.3e-3, "IQ4_XS": 5.4e-3,
    "TQ1_0": 0.63, "TQ2_0": 0.63, "MXFP4": 1.4e-2, "NVFP4": 9.1e-3,
}  # fmt: skip
BLOCKS = [DType[name] for name in NMSE]
PLAIN = [DType[n] for n in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4")]
SEARCHED = [t for t in BLOCKS if t not in PLAIN]
WEIGHTED = [*SEARCHED, *PLAIN[:4]]  # types whose quantiser heeds an importance matrix
FLOATS = [DType.F16, DType.BF16]


@pytest.fixture(params=list(isa_levels()))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYGGML_ISA", request.param)
    return request.param


@pytest.fixture(scope="module")
def golden(shared: Path) -> dict[str, Array]:
    with np.load(shared / "golden" / "quants.npz") as z:
        return dict(z)


def same_bits(a: Array, b: Array) -> bool:
    """Equal bit for bit, where any NaN equals any other."""
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


def gguf_decode(rows: Array, dtype: DType) -> Array:
    with np.errstate(all="ignore"):
        return quants.dequantize(rows, GGMLQuantizationType(dtype.gguf_id))


def gguf_encode(x: Array, dtype: DType) -> Array:
    with np.errstate(all="ignore"):
        return quants.quantize(x, GGMLQuantizationType(dtype.gguf_id))


def square_error(x: Array, stored: Array, dtype: DType, weights: Array | float = 1.0) -> Array:
    """Weighted, per row, in float64."""
    return (weights * (dequantize(stored, dtype).astype(np.float64) - x) ** 2).sum(-1)


def gaussian(rows: int, n: int = 512, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, n)).astype(np.float32)


# -- ggml's own


@pytest.mark.parametrize("dtype", [*FLOATS, *BLOCKS], ids=lambda t: t.name)
def test_golden_decode(dtype: DType, isa: str, golden: dict[str, Array]) -> None:
    assert same_bits(dequantize(golden[f"{dtype.name}/bytes"], dtype), golden[f"{dtype.name}/dequant"])


@pytest.mark.parametrize("dtype", [*FLOATS, *PLAIN], ids=lambda t: t.name)
def test_golden_bytes(dtype: DType, isa: str, golden: dict[str, Array]) -> None:
    np.testing.assert_array_equal(quantize(golden["x"], dtype), golden[f"{dtype.name}/bytes"])


@pytest.mark.parametrize("dtype", SEARCHED, ids=lambda t: t.name)
def test_golden_error(dtype: DType, golden: dict[str, Array]) -> None:
    x = golden["x"].astype(np.float64)
    ours, theirs = (square_error(x, q, dtype) for q in (quantize(x, dtype), golden[f"{dtype.name}/bytes"]))
    assert np.all(ours <= theirs * (1 + 1e-6)), np.stack([ours, theirs])


# -- the gguf package


@pytest.mark.parametrize("dtype", [DType.BF16, *BLOCKS], ids=lambda t: t.name)
def test_decode_any_bytes(dtype: DType, isa: str) -> None:
    """Random bytes: every code, every grid point, scales of any size, infinite and NaN ones among them."""
    rows = np.random.default_rng(1).integers(0, 256, (1500, dtype.type_size), np.uint8)
    assert same_bits(dequantize(rows, dtype), gguf_decode(rows, dtype))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(BLOCKS), n_blocks=st.integers(1, 5))
def test_decode_like_gguf(data: st.DataObject, dtype: DType, n_blocks: int) -> None:
    size = n_blocks * dtype.type_size
    raw = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    assert same_bits(dequantize(raw.tobytes(), dtype), gguf_decode(raw.reshape(1, -1), dtype)[0])


values = st.floats(-1e4, 1e4, width=32).filter(lambda v: v == 0 or abs(v) > 1e-6)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([DType.BF16, *PLAIN[:-1]]))  # gguf cannot write NVFP4
def test_encode_like_gguf(data: st.DataObject, dtype: DType) -> None:
    n = max(dtype.block_size, 32)
    few = data.draw(st.lists(values, min_size=1, max_size=12))
    x = np.resize(np.array(few, np.float32), (1, n)) * data.draw(st.sampled_from([1.0, 0.37, -3.0]))
    x = x.astype(np.float32)
    x[0, data.draw(st.integers(0, n - 1))] = data.draw(values)
    x += 0  # no -0: of a block of nothing but zeros gguf stores the first one's sign in d, ggml does not
    np.testing.assert_array_equal(quantize(x, dtype), gguf_encode(x, dtype))


# -- properties


@pytest.mark.parametrize("dtype", BLOCKS, ids=lambda t: t.name)
def test_round_trip_error(dtype: DType) -> None:
    x = gaussian(6)
    nmse = square_error(x, quantize(x, dtype), dtype).sum() / (x.astype(np.float64) ** 2).sum()
    assert nmse <= NMSE[dtype.name]


@pytest.mark.parametrize("dtype", BLOCKS, ids=lambda t: t.name)
def test_same_bytes_everywhere(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file does not depend on the machine that wrote it."""
    x = gaussian(2) * np.where(np.arange(512) % 97 == 5, 20, 1).astype(np.float32)
    weights = np.exp(gaussian(1)[0])
    outcomes: list[bytes] = []
    for level in isa_levels():
        monkeypatch.setenv("PYGGML_ISA", level)
        outcomes.append(quantize(x, dtype).tobytes() + quantize(x, dtype, weights).tobytes())
    assert len(set(outcomes)) == 1


@pytest.mark.parametrize("dtype", [DType.Q4_K, DType.Q8_0, DType.F32], ids=lambda t: t.name)
def test_threads_and_shapes(dtype: DType) -> None:
    x = gaussian(300).reshape(3, 100, 512)
    alone, shared_out = quantize(x, dtype, n_threads=1), quantize(x, dtype, n_threads=2)
    assert alone.shape == (3, 100, dtype.row_size(512))
    np.testing.assert_array_equal(alone, shared_out)
    back = dequantize(alone, dtype, n_threads=1)
    assert back.shape == x.shape and back.dtype == np.float32
    assert same_bits(back, dequantize(alone.tobytes(), dtype, (3, 100, 512), n_threads=2))


@pytest.mark.parametrize("dtype", BLOCKS, ids=lambda t: t.name)
def test_zero_blocks(dtype: DType, isa: str) -> None:
    x = gaussian(1, 768)
    x[0, 256:512] = 0
    back = dequantize(quantize(x, dtype), dtype)
    assert np.all(back[0, 256:512] == 0) and np.any(back[0, :256] != 0)
    for weights in (None, np.ones(768)):
        assert not np.any(dequantize(quantize(np.zeros((2, 768)), dtype, weights), dtype))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, 1e-45])
@pytest.mark.parametrize("dtype", [*FLOATS, *BLOCKS], ids=lambda t: t.name)
def test_hostile_values(dtype: DType, bad: float, isa: str) -> None:
    """Extremes do no harm beyond their own row; NaN and infinities are for floats alone."""
    x = gaussian(3, 256)
    clean = quantize(x, dtype)
    x[1, ::7] = bad
    if dtype in BLOCKS and not np.isfinite(bad):
        for weights in (None, np.ones(256)):
            with pytest.raises(DTypeError, match=f"{dtype.name} has no number for {bad}"):
                quantize(x, dtype, weights)
        return
    for weights in (None, np.ones(256)):
        stored = quantize(x, dtype, weights)
        if weights is None:
            np.testing.assert_array_equal(stored[[0, 2]], clean[[0, 2]])
    x[1] = bad
    quantize(x, dtype, np.linspace(0, 1, 256))


@pytest.mark.parametrize("dtype", PLAIN[:4], ids=lambda t: t.name)
def test_nan_is_passed_over(dtype: DType, isa: str) -> None:
    """Ops may bring NaN to a block (`quantize` refuses it): scales, and codes of other values, are as without it."""
    x = gaussian(32, 32)
    others = x.copy()
    for i in range(32):
        x[i, i], others[i, i] = np.nan, x[i, i - 1]
    n = dtype.type_size - 16 - 4 * (dtype in (DType.Q5_0, DType.Q5_1))  # bytes of d and m
    stored = [np.zeros((32, dtype.type_size), np.uint8) for _ in range(2)]
    for values, out in zip((x, others), stored, strict=True):
        src, dst = ffi.from_buffer("float[]", values), ffi.from_buffer("char[]", out)
        assert lib.pg_quantize(isa_levels()[isa], dtype.gguf_id, src, ffi.NULL, dst, 32, 32, dtype.type_size) == 0
    assert np.array_equal(stored[0][:, :n], stored[1][:, :n])
    codes = [dequantize(out, dtype) for out in stored]
    others_of = ~np.eye(32, dtype=bool)
    assert np.array_equal(codes[0][others_of], codes[1][others_of])


@pytest.mark.parametrize("dtype", BLOCKS, ids=lambda t: t.name)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_one_sided_and_tiny(dtype: DType, scale: float) -> None:
    """Rows of one sign, and of one nonzero value, come back with less error than zeros would have."""
    for x in (np.abs(gaussian(2)) * scale, np.eye(2, 512, dtype=np.float32) * -scale):
        if dtype is not DType.NVFP4 or np.abs(x).max() > 1e-3:  # whose scales end at 2^-9
            assert np.all(square_error(x, quantize(x, dtype), dtype) < (x.astype(np.float64) ** 2).sum(-1))


def test_minus_128(isa: str) -> None:
    block = np.concatenate([np.array([-0.5], np.float16).view(np.uint8), np.full(32, 0x80, np.uint8)])
    assert np.all(dequantize(block, DType.Q8_0) == 64)


@pytest.mark.parametrize("dtype", WEIGHTED, ids=lambda t: t.name)
def test_imatrix(dtype: DType) -> None:
    """Weights lower the weighted error; weights of one are as good as none; their scale does not matter."""
    x, weights = gaussian(4), np.exp(1.5 * gaussian(1, seed=3)[0]).astype(np.float64)
    heeded = square_error(x, quantize(x, dtype, weights), dtype, weights).sum()
    assert heeded < 0.995 * square_error(x, quantize(x, dtype), dtype, weights).sum()
    np.testing.assert_array_equal(quantize(x, dtype, weights), quantize(x, dtype, weights * 2.0**20))
    if dtype in SEARCHED:
        np.testing.assert_array_equal(quantize(x, dtype, np.ones(512)), quantize(x, dtype))


def test_imatrix_with_unused_columns() -> None:
    x, weights = gaussian(2), np.ones(512)
    weights[:256] = 0
    for dtype in WEIGHTED:
        back = dequantize(quantize(x, dtype, weights), dtype)
        assert np.corrcoef(back[:, :256].ravel(), x[:, :256].ravel())[0, 1] > 0.8, dtype


def test_errors() -> None:
    x = gaussian(1)
    with pytest.raises(ShapeError, match="Q4_K"):
        quantize(x[:, :100], DType.Q4_K)
    with pytest.raises(ShapeError, match="blocks of 18"):
        dequantize(np.zeros(17, np.uint8), DType.Q4_0)
    with pytest.raises(ShapeError, match="hold 32 elements"):
        dequantize(np.zeros(18, np.uint8), DType.Q4_0, (64,))
    with pytest.raises(ShapeError, match="imatrix"):
        quantize(x, DType.Q4_K, np.ones(256))
    with pytest.raises(BackendError, match="imatrix"):
        quantize(x, DType.Q4_K, np.full(512, -1.0))
    with pytest.raises(DTypeError, match="Q8_1"):
        quantize(x, DType.Q8_1)
    with pytest.raises(DTypeError, match="complex"):
        quantize(x.astype(complex), DType.Q8_0)
    with pytest.raises(BackendError, match="n_threads"):
        quantize(x, DType.Q8_0, n_threads=0)


def test_a_type_that_gguf_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of an older version: it cannot be decoded in NumPy, and is encoded by the C kernels."""
    x = np.linspace(-1, 1, 64, dtype=np.float32)

    class Older(IntEnum):
        F32 = 0

    monkeypatch.setattr("gguf.GGMLQuantizationType", Older)
    stored = codec.encode(x, DType.MXFP4)
    assert np.array_equal(stored, quantize(x, DType.MXFP4).reshape(-1))
    with pytest.raises(DTypeError, match="MXFP4: the gguf package that is installed does not know this type"):
        codec.decode(stored, DType.MXFP4, (64,))
