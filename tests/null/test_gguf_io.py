"""The GGUF reader against files of the gguf package, and against files that lie."""

from __future__ import annotations

import struct
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyggml.dtypes import DType
from pyggml.errors import GGUFError
from pyggml.gguf_io import read as gguf_io
from pyggml.gguf_io.keys import Keys
from pyggml.gguf_io.read import GGUFFile, lock_memory, open_gguf, with_overrides

from ..gguf_files import write_all

RNG = np.random.default_rng(1)
A = RNG.standard_normal((3, 5, 32), dtype=np.float32)
B = RNG.standard_normal((4, 64), dtype=np.float32)


def write(path: Path, alignment: int | None = None, endian: GGUFEndian = GGUFEndian.LITTLE) -> Path:
    w = GGUFWriter(path, "llama", endianess=endian)
    if alignment is not None:
        w.add_custom_alignment(alignment)
    w.add_uint8("u8", 200)
    w.add_int8("i8", -100)
    w.add_uint16("u16", 60000)
    w.add_int16("i16", -30000)
    w.add_uint32("u32", 2**32 - 1)
    w.add_int32("i32", -(2**31))
    w.add_float32("f32", 0.5)
    w.add_uint64("u64", 2**64 - 1)
    w.add_int64("i64", -(2**63))
    w.add_float64("f64", 1e300)
    w.add_bool("yes", True)
    w.add_string("text", "grüße 🙂")
    w.add_array("words", ["a", "", "ß", "▁the"])
    w.add_array("ints", [1, -2, 3])
    w.add_array("floats", [0.25, -1.5])
    w.add_array("bools", [True, False])
    w.add_tensor("a", A)
    w.add_tensor("b.f16", B.astype(np.float16))
    w.add_tensor("c.q8", quants.quantize(B, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
    write_all(w)
    return path


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("gguf") / "good.gguf").read_bytes()


def s(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def kv(key: str | bytes, vtype: int, value: bytes) -> bytes:
    return s(key) + struct.pack("<I", vtype) + value


def info(name: str | bytes, dims: Sequence[int], dtype: int = 0, offset: int = 0) -> bytes:
    return s(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, dtype, offset)


def build(
    kvs: Sequence[bytes] = (),
    infos: Sequence[bytes] = (),
    data: int = 0,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_kv: int | None = None,
    n_tensors: int | None = None,
) -> bytes:
    """A file by hand, with `data` zero bytes after the aligned metadata."""
    head = magic + struct.pack(
        "<IQQ", version, len(infos) if n_tensors is None else n_tensors, len(kvs) if n_kv is None else n_kv
    )
    raw = head + b"".join(kvs) + b"".join(infos)
    return raw + bytes(-len(raw) % 32 + data)


def open_bytes(tmp_path: Path, raw: bytes) -> GGUFFile:
    path = tmp_path / "x.gguf"
    path.write_bytes(raw)
    return open_gguf(path)


U8, U32, STR, ARR, BOOL = 0, 4, 8, 9, 7
ONE = [kv("k", U8, b"\x07")]


@pytest.mark.parametrize("alignment", [None, 64, 8])
@pytest.mark.parametrize("use_mmap", [True, False])
def test_reads_what_the_writer_wrote(tmp_path: Path, use_mmap: bool, alignment: int | None) -> None:
    path = write(tmp_path / "m.gguf", alignment)
    g = open_gguf(path, use_mmap=use_mmap)
    assert (g.version, g.alignment, g.path, g.size) == (3, alignment or 32, str(path), path.stat().st_size)
    want: dict[str, Any] = {
        "u8": 200,
        "i8": -100,
        "u16": 60000,
        "i16": -30000,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "f32": 0.5,
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 1e300,
        "yes": True,
        "text": "grüße 🙂",
        "words": ["a", "", "ß", "▁the"],
        "general.architecture": "llama",
    }
    for key, value in want.items():
        assert g.kv[key] == value and type(g.kv[key]) is type(value), key
    for key, value, dtype in (
        ("ints", [1, -2, 3], np.int32),
        ("floats", [0.25, -1.5], np.float32),
        ("bools", [True, False], np.bool_),
    ):
        array = g.kv[key]
        assert isinstance(array, np.ndarray)
        assert array.tolist() == value and array.dtype == dtype and not array.flags.writeable
    assert [t.name for t in g.tensors.values()] == ["a", "b.f16", "c.q8"]
    assert (g.tensors["a"].ne, g.tensors["a"].dtype) == ((32, 5, 3, 1), DType.F32)
    assert (g.tensors["c.q8"].ne, g.tensors["c.q8"].nbytes) == ((64, 4, 1, 1), 4 * 2 * 34)
    assert np.array_equal(g.tensor_bytes("a").view(np.float32).reshape(A.shape), A)
    assert np.array_equal(g.tensor_bytes("b.f16").view(np.float16).reshape(B.shape), B.astype(np.float16))
    assert g.tensor_bytes("c.q8").tobytes() == quants.quantize(B, GGMLQuantizationType.Q8_0).tobytes()
    view = g.tensor_bytes("a")
    assert np.shares_memory(view, g.data) and not view.flags.writeable and view.ctypes.data % (alignment or 32) == 0
    with pytest.raises(GGUFError, match="no tensor named 'nope'"):
        g.tensor_bytes("nope")


def test_version_2_is_read(tmp_path: Path, good: bytes) -> None:
    g = open_bytes(tmp_path, good[:4] + struct.pack("<I", 2) + good[8:])
    assert g.version == 2 and len(g.tensors) == 3


def test_shared_files_as_gguf_reader_sees_them(shared: Path) -> None:
    paths = sorted(p for p in shared.glob("**/*.gguf") if p.stat().st_size < 1 << 20)  # theirs is slow
    assert paths
    for path in paths:
        g, r = open_gguf(path), GGUFReader(path)
        theirs = {k: f for k, f in r.fields.items() if not k.startswith("GGUF.")}
        assert list(g.kv) == list(theirs)
        for key, field in theirs.items():
            value = g.kv[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
        assert list(g.tensors) == [t.name for t in r.tensors]
        for t in r.tensors:
            mine = g.tensors[t.name]
            assert (mine.offset, mine.nbytes, mine.dtype.gguf_id) == (t.data_offset, t.n_bytes, t.tensor_type.value)
            assert list(mine.ne) == [*t.shape.tolist(), *[1] * (4 - len(t.shape))]
            assert g.tensor_bytes(t.name).tobytes() == t.data.tobytes()


HUGE = 2**64 - 1
LIES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "0 bytes are too few"),
    "magic": (lambda: build(magic=b"GGML"), r"not a GGUF file: it begins with b'GGML' \(at byte 0\)"),
    "a pointer": (
        lambda: b"version https://git-lfs.github.com/spec/v1\noid",
        "it begins with b'vers', as a pointer of Git",
    ),
    "no model": (lambda: b"Entry not found", r"15 bytes \(b'Entry not found'\) are too few"),
    "a page": (lambda: b"\n<!DOCTYPE html><html></html>", "as a web page does: a site has answered"),
    "an answer": (lambda: b'{"error": "Repository not found"}', "as a JSON text does"),
    "PyTorch's": (lambda: b"PK\3\4" + bytes(30), "or weights in PyTorch's format"),
    "compressed": (lambda: b"\x1f\x8b\x08" + bytes(30), "gzip"),
    "of 2023": (lambda: b"tjgg\3" + bytes(30), "before GGUF"),
    "safetensors": (lambda: b"\x40" + bytes(7) + b'{"a":{"dtype":"F32"', "as a safetensors file does"),
    "version 1": (lambda: build(version=1), "version 1 is not read"),
    "version 4": (lambda: build(version=4), "version 4 is not read"),
    "version 0": (lambda: build(version=0), "version 0 is not read"),
    "big endian": (lambda: build(version=3 << 24), "big-endian"),
    "n_kv": (lambda: build(ONE, n_kv=HUGE), f"{HUGE} keys cannot fit"),
    "n_kv small lie": (lambda: build(ONE, n_kv=2), "key 1 has 0 bytes"),
    "n_tensors": (lambda: build(ONE, n_tensors=HUGE), f"{HUGE} tensors cannot fit"),
    "n_tensors small lie": (lambda: build(ONE, [info("t", [32])], 128, n_tensors=2), "name of tensor 1 has 0 bytes"),
    "key length": (
        lambda: build([struct.pack("<QQ", 60000, 0)]),
        r"key 0 needs 60000 bytes, and only 32 are left \(at byte 32\)",
    ),
    "key too long": (lambda: build([s("k" * 65536) + bytes(5)]), "key 0 has 65536 bytes"),
    "key empty": (lambda: build([kv("", U8, b"\0")], data=32), "key 0 has 0 bytes"),
    "key not UTF-8": (lambda: build([kv(b"\xff\xfe", U8, b"\0")]), r"key 0 is not UTF-8 \(at byte 32\)"),
    "key twice": (lambda: build(ONE * 2), "the key 'k' occurs twice"),
    "value type": (lambda: build([kv("k", 13, bytes(8))]), "the value of 'k' has the unknown type 13"),
    "string length": (lambda: build([kv("k", STR, struct.pack("<Q", HUGE))]), "'k': string 0 of 1 runs past the end"),
    "array length": (lambda: build([kv("k", ARR, struct.pack("<IQ", U32, HUGE))]), "the value of 'k' needs"),
    "strings length": (lambda: build([kv("k", ARR, struct.pack("<IQ", STR, HUGE))]), f"'k': {HUGE} strings cannot fit"),
    "strings lie": (
        lambda: build([kv("k", ARR, struct.pack("<IQ", STR, 2) + s("ok") + struct.pack("<Q", 99))]),
        "string 1 of 2 runs past the end",
    ),
    "element type": (lambda: build([kv("k", ARR, struct.pack("<IQ", 99, 1) + bytes(8))]), "unknown type 99"),
    "nested": (lambda: build([kv("k", ARR, struct.pack("<IQ", ARR, 1) + bytes(12))]), "array of arrays"),
    "bool": (lambda: build([kv("k", BOOL, b"\x02")]), "neither 0 nor 1"),
    "alignment 0": (lambda: build([kv("general.alignment", U32, struct.pack("<I", 0))]), "alignment 0 is not a power"),
    "alignment 2^22": (  # 102 bytes became a file of a gigabyte when they were merged, split or quantized
        lambda: build([kv("general.alignment", U32, struct.pack("<I", 1 << 22))]),
        "4194304 is not supported: up to 2097152 are",
    ),
    "alignment 48": (lambda: build([kv("general.alignment", U32, struct.pack("<I", 48))]), "48 is not a power of two"),
    "alignment type": (lambda: build([kv("general.alignment", STR, s("32"))]), "is a STRING, not a UINT32"),
    "tensor type": (lambda: build(ONE, [info("t", [32], 4)], 128), "tensor 't' has the unknown type 4"),
    "tensor twice": (lambda: build(ONE, [info("t", [8]), info("t", [8], 0, 32)], 128), "tensor 't' occurs twice"),
    "tensor name long": (lambda: build(ONE, [info("t" * 65, [8])], 128), "name of tensor 0 has 65 bytes"),
    "tensor name not UTF-8": (lambda: build(ONE, [info(b"\xc3", [8])], 128), "name of tensor 0 is not UTF-8"),
    "n_dims": (lambda: build(ONE, [info("t", [1] * 5)], 128), "tensor 't' has 5 dims"),
    "dim 0": (lambda: build(ONE, [info("t", [8, 0])], 128), r"tensor 't' has a dim of 0: \[8, 0\]"),
    "dims overflow": (lambda: build(ONE, [info("t", [2**32, 2**32])], 128), "tensor 't', F32 .* of a file of"),
    "dim overflow": (lambda: build(ONE, [info("t", [HUGE] * 4)], 128), "tensor 't', F32 .* of a file of"),
    "block size": (lambda: build(ONE, [info("t", [33], 8)], 128), "tensor 't': 33 elements are not a whole number"),
    "unaligned": (lambda: build(ONE, [info("t", [8], 0, 4)], 128), "offset 4 is not a multiple of the alignment 32"),
    "offset outside": (lambda: build(ONE, [info("t", [8], 0, 128)], 128), "needs bytes .* of a file of"),
    "offset wraps": (lambda: build(ONE, [info("t", [8], 0, 2**64 - 32)], 128), "needs bytes .* of a file of"),
    "data cut": (lambda: build(ONE, [info("t", [8])], 31), "needs bytes .* of a file of"),
    "overlap": (
        lambda: build(ONE, [info("t", [16]), info("u", [8], 0, 32)], 128),
        "tensor 'u' overlaps tensor 't'",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_named(tmp_path: Path, lie: str) -> None:
    make, message = LIES[lie]
    with pytest.raises(GGUFError, match=message):
        open_bytes(tmp_path, make())


def test_the_honest_twins_of_the_lies(tmp_path: Path) -> None:
    g = open_bytes(tmp_path, build(ONE, [info("t", [8]), info("s", [], 0, 32), info("u", [8, 1], 0, 64)], 96))
    assert g.kv == {"k": 7} and g.tensors["s"].ne == (1, 1, 1, 1) and g.tensors["u"].nbytes == 32
    assert open_bytes(tmp_path, build(ONE)).tensors == {}
    g = open_bytes(tmp_path, build([kv("k", STR, s(b"a\xffb"))]))
    assert g.kv["k"] == "a\udcffb"


def test_a_file_written_big_endian(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="big-endian"):
        open_gguf(write(tmp_path / "be.gguf", endian=GGUFEndian.BIG))


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="No such file"):
        open_gguf(tmp_path / "missing.gguf")
    with pytest.raises(GGUFError, match="directory"):
        open_gguf(tmp_path)


def peak_of(path: Path, raw: bytes, use_mmap: bool = True) -> int:
    """Peak bytes that Python and NumPy allocate in opening `raw`; any error but GGUFError escapes."""
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        open_gguf(path, use_mmap=use_mmap)
    except GGUFError as e:
        assert str(path) in str(e) and len(str(e)) < 1000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def test_truncated_at_every_byte_of_the_metadata(tmp_path: Path, good: bytes) -> None:
    path = tmp_path / "cut.gguf"
    last = open_bytes(tmp_path, good).tensors["c.q8"]
    end = last.offset + last.nbytes
    assert end < len(good)
    assert open_bytes(tmp_path, good[:end]).tensors["c.q8"] == last  # the padding after the last tensor holds nothing
    for n in [*range(1500), *range(end - 40, end)]:
        path.write_bytes(good[:n])
        with pytest.raises(GGUFError):
            open_gguf(path)


FUZZ = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
NUMBERS = st.one_of(
    st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 32])
)


@FUZZ
@given(
    flips=st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 255)), min_size=1, max_size=8),
    cut=st.integers(0, 6000),
    use_mmap=st.booleans(),
)
def test_flipped_bytes(tmp_path: Path, good: bytes, flips: list[tuple[int, int]], cut: int, use_mmap: bool) -> None:
    raw = bytearray(good)
    for at, value in flips:
        raw[at] = value
    assert peak_of(tmp_path / "f.gguf", bytes(raw[: len(raw) - max(0, cut - 5000)]), use_mmap) < 200_000


@FUZZ
@given(at=st.integers(4, 1500), value=NUMBERS, size=st.sampled_from([4, 8]))
def test_lying_numbers_anywhere(tmp_path: Path, good: bytes, at: int, value: int, size: int) -> None:
    raw = bytearray(good)
    raw[at : at + size] = struct.pack("<Q", value)[:size]
    assert peak_of(tmp_path / "f.gguf", bytes(raw)) < 200_000


@FUZZ
@given(
    vtype=st.sampled_from([int(t) for t in GGUFValueType]),
    count=NUMBERS,
    dims=st.lists(NUMBERS, max_size=4),
    offset=NUMBERS,
    dtype=st.sampled_from([0, 1, 2, 8, 12, 30]),
)
def test_lying_counts(tmp_path: Path, vtype: int, count: int, dims: list[int], offset: int, dtype: int) -> None:
    array = kv("array", ARR, struct.pack("<IQ", vtype, count))
    path = tmp_path / "f.gguf"
    assert peak_of(path, build([array], data=1000)) < 100_000
    assert peak_of(path, build(ONE, [info("t", dims, dtype, offset)], 1000)) < 100_000
    assert peak_of(path, build(ONE, [info("t", dims, dtype, offset)], 1000, n_tensors=count)) < 100_000


def test_a_sparse_file_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    raw = build(ONE, [info("t", [2**20, 2**10], 0, 0)])  # 4 GiB of holes
    path.write_bytes(raw)
    with path.open("r+b") as f:
        f.truncate(len(raw) + 2**32)
    tracemalloc.start()
    g = open_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert g.tensors["t"].nbytes == 2**32 and peak < 100_000
    with path.open("r+b") as f:
        f.truncate(len(raw) + 2**32 - 1)
    with pytest.raises(GGUFError, match="tensor 't'"):
        open_gguf(path)


def test_overrides() -> None:
    old: dict[str, Any] = {"i": 3, "f": 0.5, "s": "x", "b": True, "l": ["a"], "n": np.arange(3)}
    new = with_overrides(old, {"i": 4, "f": 2, "s": "y", "b": False, "added": 7})
    assert [new[k] for k in ("i", "f", "s", "b", "added")] == [4, 2.0, "y", False, 7]
    assert isinstance(new["f"], float) and old["i"] == 3 and with_overrides(old, None) == old
    for key, value in (("i", "4"), ("i", 4.0), ("i", True), ("f", "1"), ("f", False), ("s", 1), ("b", 1), ("b", "yes")):
        with pytest.raises(GGUFError, match=rf"override of '{key}': a {type(value).__name__} for a"):
            with_overrides(old, {key: value})
    for key in ("l", "n"):
        with pytest.raises(GGUFError, match="array"):
            with_overrides(old, {key: 1})
    with pytest.raises(GGUFError, match="a list is not"):
        with_overrides(old, {"new": [1]})  # type: ignore[dict-item]


def test_lock_memory() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        locked = lock_memory(np.zeros(4096, np.uint8))
    assert locked or [w.category for w in caught] == [RuntimeWarning]
    far = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (2**46,), (1,))  # more than the address space holds
    with pytest.warns(RuntimeWarning, match="cannot lock"):
        assert not lock_memory(far)


def test_constants_are_those_of_the_gguf_package() -> None:
    assert {t.name: int(t) for t in gguf_io.GGUFValueType} == {t.name: int(t) for t in GGUFValueType}
    assert gguf_io.GGUF_MAGIC == gguf.GGUF_MAGIC
    assert gguf_io.GGUF_DEFAULT_ALIGNMENT == gguf.GGUF_DEFAULT_ALIGNMENT
    assert gguf_io.ALIGNMENT_KEY == gguf.Keys.General.ALIGNMENT


def test_keys_are_those_of_the_gguf_package() -> None:
    def compare(own: type, theirs: type) -> int:
        found = {name: value for name, value in vars(own).items() if not name.startswith("__")}
        texts = {name: value for name, value in found.items() if isinstance(value, str)}
        assert texts == {name: getattr(theirs, name) for name in texts}
        return len(texts) + sum(compare(found[name], getattr(theirs, name)) for name in found.keys() - texts.keys())

    assert compare(Keys, gguf.Keys) > 50
