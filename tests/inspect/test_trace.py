"""Traces on disk, where two runs part, and captures that go on where they were broken off."""

from __future__ import annotations

import json
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from pyggml.tools.cli import app

import pyggml as gg
from pyggml import limits
from pyggml.errors import BatchError, GGUFError, GraphError, ModelError
from pyggml.inspect.capture import capture
from pyggml.inspect.trace import Trace, diff, load_trace, save_trace, trace
from pyggml.llm.model import Model, load_model

from ..tiny_model import write_gguf

IDS = [5, 6, 7, 250, 9, 11, 30]
F32: Any = {"type_k": gg.F32, "type_v": gg.F32}


@pytest.fixture(scope="module")
def model(tiny: Path) -> Model:
    return load_model(tiny)


def test_a_trace_comes_back(model: Model, tmp_path: Path) -> None:
    t = trace(model, IDS, "l_out-*", "result_*")
    assert list(t.arrays) == ["l_out-0", "l_out-1", "result_norm", "result_output"]
    assert t.arrays["l_out-1"].shape == (7, 32) and t.arrays["result_output"].shape == (7, 259)
    save_trace(t, tmp_path / "t.npz")
    back = load_trace(tmp_path / "t.npz")
    assert back.about == t.about and back.about["tokens"] == IDS
    assert list(back.arrays) == list(t.arrays)
    assert all(np.array_equal(back.arrays[n], x) for n, x in t.arrays.items())
    with np.load(tmp_path / "t.npz") as z:
        assert np.array_equal(z["l_out-0"], t.arrays["l_out-0"])
    assert diff(back, model).first is None  # of the tokens that it tells


def test_arrays_of_a_trace_are_contiguous(model: Model) -> None:
    """Of the node that attention lays out otherwise, too; its shape is one with flash attention."""
    shapes: list[tuple[int, ...]] = []
    for flash_attn in (False, True):
        arrays = trace(model, IDS, "kqv_merged-*", "Qcur-*", "q-*", "v_cache_view-*", flash_attn=flash_attn).arrays
        assert all(x.flags.c_contiguous for x in arrays.values())
        shapes.append(arrays["kqv_merged-0"].shape)
    assert shapes == [(7, 4, 8)] * 2


def test_another_library_s_hidden_states(model: Model, tmp_path: Path) -> None:
    want = trace(model, IDS, "l_out-*").arrays
    np.savez(tmp_path / "other.npz", **{name: x + np.float32(1e-5) for name, x in want.items()})
    d = diff(load_trace(tmp_path / "other.npz"), model, IDS)
    assert [n.name for n in d.nodes] == ["l_out-0", "l_out-1"] and d.first is None and not d.only_a
    assert "result_output" in d.only_b


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no", b"nothing"])
def test_what_is_no_trace(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.npz").write_bytes(content)
    with pytest.raises(GGUFError, match=r"t.npz is no trace"):
        load_trace(tmp_path / "t.npz")


def test_backends_agree_and_types_of_caches_do_not(model: Model) -> None:
    same = diff(model, model, IDS, options_a=F32, options_b={"backend": "ref", **F32})
    assert same.first is None and len(same.nodes) > 40 and not same.only_a and not same.only_b
    coarse = diff(model, model, IDS, options_a=F32, options_b={"type_k": gg.BF16}, tolerance=1e-9)
    assert coarse.first is not None and coarse.first.name == "kq-0"
    assert [n.name for n in coarse.layers()] == ["l_out-0", "l_out-1"]


@pytest.mark.parametrize(
    ("tensor", "node"),
    [("blk.1.ffn_down.weight", "ffn_out-1"), ("blk.0.attn_v.weight", "Vcur-0"), ("output_norm.weight", "result_norm")],
)
def test_a_perturbed_weight_is_found(tmp_path: Path, model: Model, tensor: str, node: str) -> None:
    path = write_gguf(tmp_path / "other.gguf")
    at = load_model(path).tensors[tensor]
    raw = bytearray(path.read_bytes())
    where = raw.find(at.raw().tobytes())
    raw[where : where + 4] = np.float32(3).tobytes()
    path.write_bytes(raw)
    first = diff(model, load_model(path), IDS).first
    assert first is not None and first.name == node


def test_infinities_and_shapes() -> None:
    inf = np.array([[1.0, -np.inf]], np.float32)
    assert diff(Trace({"kq": inf}), Trace({"kq": inf})).first is None
    first = diff(Trace({"x": inf}), Trace({"x": -inf})).first
    assert first is not None and "not finite" in first.note
    first = diff(Trace({"x": inf}), Trace({"x": inf[:, :1]})).first
    assert first is not None and "shapes (1, 2) and (1, 1)" in first.note


def test_what_cannot_be_traced(model: Model) -> None:
    with pytest.raises(GraphError, match="no node of llama is called nothing"):
        trace(model, IDS, "nothing")
    with pytest.raises(ModelError, match="a prompt is needed"):
        diff(model, Trace())


def test_on_the_command_line(tiny: Path, tmp_path: Path) -> None:
    run = CliRunner()
    out = str(tmp_path / "t.npz")
    done = run.invoke(app, ["trace", "-m", str(tiny), "-p", "abc", "-o", out, "--nodes", "l_out-*"])
    assert done.exit_code == 0 and "2 nodes of 7 tokens" in done.output
    done = run.invoke(app, ["diff", out, f"{tiny}:backend=ref", "--json"])
    assert done.exit_code == 0 and json.loads(done.output)["equal"] is True
    done = run.invoke(app, ["diff", str(tiny), f"{tiny}:type_k=bf16,flash_attn=1", "-p", "abc", "--tolerance", "0"])
    assert done.exit_code == 3 and "first beyond 0: " in done.output
    line = ["diff", str(tiny), f"{tiny}:quantize=q8_0", "-p", "abc", "--json", "--tolerance", "1e-3"]
    done = run.invoke(app, line)
    found = {n["name"]: n["nmse"] for n in json.loads(done.output)["nodes"]}
    assert done.exit_code == 0 and 1e-9 < found["Qcur-0"] < 1e-3 and found["result_output"] > 1e-9, done.output
    for bad, why in (
        (f"{tiny}:quantize=nothing", "nothing"),
        (f"{tiny}:isa=x", "x"),
        (f"{tiny}:colour=1", "colour is none of"),
        (f"{out}:isa=avx2", "takes no"),
    ):
        done = run.invoke(app, ["diff", str(tiny), bad, "-p", "abc"])
        assert done.exit_code == 2 and why in done.output


# -- captures ----------------------------------------------------------------------------------------------------------


def test_a_capture_is_what_taps_see(model: Model, tmp_path: Path) -> None:
    ids = [int(i) for i in np.random.default_rng(0).integers(3, 259, 75)]
    files = capture(model, ids, tmp_path, "l_out-*", n_ctx=32)
    assert sorted(files) == ["l_out-0", "l_out-1"]
    for begin in (0, 32, 64):
        want = trace(model, ids[begin : begin + 32], "l_out-1").arrays["l_out-1"]
        got = np.load(files["l_out-1"], mmap_mode="r")
        assert got.shape == (75, 32) and np.array_equal(got[begin : begin + 32], want)


def test_a_capture_goes_on(model: Model, tmp_path: Path) -> None:
    ids = [5, 6, 7, 8] * 20
    whole = np.load(capture(model, ids, tmp_path / "whole", "l_out-1", n_ctx=16)["l_out-1"])

    def stop(done: int, total: int) -> None:
        assert total == 80
        if done == 32:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(model, ids, tmp_path / "part", "l_out-1", n_ctx=16, progress=stop)
    seen: list[int] = []
    files = capture(model, ids, tmp_path / "part", "l_out-1", n_ctx=16, progress=lambda done, _: seen.append(done))
    assert seen == [48, 64, 80] and np.array_equal(np.load(files["l_out-1"]), whole)
    with pytest.raises(ModelError, match="another capture: n_ctx differ"):
        capture(model, ids, tmp_path / "part", "l_out-1", n_ctx=8)


def test_what_cannot_be_captured(model: Model, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"kq-0 has shape \(4, 7, \d+\): no row for each"):
        capture(model, IDS, tmp_path / "a", "kq-0")
    with pytest.raises(GraphError, match="no node"):
        capture(model, IDS, tmp_path / "b", "nothing")
    with pytest.raises(ModelError, match="n_ubatch cannot be given"):
        capture(model, IDS, tmp_path / "c", "l_out-0", n_ubatch=4)
    with pytest.raises(ModelError, match="float16, float32 or float64"):
        capture(model, IDS, tmp_path / "d", "l_out-0", dtype="i4")
    capture(model, IDS, tmp_path / "e", "l_out-*")
    (tmp_path / "e" / "l_out-1.npy").unlink()
    with pytest.raises(ModelError, match=r"a part of this capture: l_out-1\.npy is missing"):
        capture(model, IDS, tmp_path / "e", "l_out-*")
    (tmp_path / "e" / "manifest.json").write_text("[]")
    with pytest.raises(ModelError, match="not that of a capture"):
        capture(model, IDS, tmp_path / "e", "l_out-*")


def test_what_cannot_be_compared(model: Model, tmp_path: Path) -> None:
    a, b = trace(model, IDS, "l_out-*"), trace(model, IDS, "attn_norm-*")
    with pytest.raises(GraphError, match="no node in common"):
        diff(a, b)
    with pytest.raises(ModelError, match="of other tokens"):
        diff(a, model, [5, 6])
    with pytest.raises(ModelError, match="tolerance"):
        diff(a, a, tolerance=float("nan"))
    with pytest.raises(ModelError, match="not int and Model"):
        diff(3, model, IDS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="n_ubatch cannot be given"):
        trace(model, IDS, n_ubatch=4)
    with pytest.raises(BatchError):
        trace(model, [1.7])  # pyright: ignore[reportArgumentType]
    first = diff(Trace({"kqv-0": np.ones((4, 64))}), Trace({"kqv-0": np.ones((4, 128))})).first
    assert first is not None and "shapes" in first.note
    with zipfile.ZipFile(tmp_path / "t.npz", "w") as z:
        z.writestr("manifest.json", '{"nodes": 3}')
    with pytest.raises(GGUFError, match="no trace"):
        load_trace(tmp_path / "t.npz")


def _npz(path: Path, entries: dict[str, bytes], packing: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", packing) as z:
        for name, data in entries.items():
            z.writestr(name, data)
    return path


def _npy(header: str, data: bytes = bytes(16), version: int = 1) -> bytes:
    text = header.encode().ljust(118 - len(header) % 2) + b"\n"
    size = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + data


GOOD = _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4,)}")
BAD: dict[str, dict[str, bytes]] = {
    "descr": {"a.npy": _npy("{'descr': '|O', 'fortran_order': False, 'shape': (2,)}")},
    "text": {"a.npy": _npy("{'descr': '<U4', 'fortran_order': False, 'shape': (1,)}")},
    "huge": {"a.npy": _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}")},
    "overflow": {"a.npy": _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4, " + "9" * 40 + ")}")},
    "negative": {"a.npy": _npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -2)}")},
    "header": {"a.npy": _npy("{'descr': '<f4', 'fortran_order'")},
    "token": {"a.npy": _npy("'''")},
    "deep": {"a.npy": _npy("(" * 9000, version=2)},
    "magic": {"a.npy": b"NUMPY" * 40},
    "version": {"a.npy": GOOD.replace(b"Y\x01\x00", b"Y\x09\x00")},
    "empty": {"a.npy": b""},
    "manifest": {"manifest.json": b"[" * 10**5, "a.npy": GOOD},
    "no object": {"manifest.json": b"3", "a.npy": GOOD},
    "nodes": {"manifest.json": b'{"nodes": [["a"]]}', "a.npy": GOOD},
    "missing": {"manifest.json": b'{"nodes": ["b"]}', "a.npy": GOOD},
    "tokens": {"manifest.json": b'{"nodes": ["a"], "tokens": {"x": 1}}', "a.npy": GOOD},
}


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_is_no_trace(tmp_path: Path, what: str) -> None:
    with pytest.raises(GGUFError, match=r"t\.npz is no trace: "):
        load_trace(_npz(tmp_path / "t.npz", BAD[what]))


def test_a_damaged_trace(tmp_path: Path) -> None:
    """Of a packed file, each byte changed in some way."""
    data = _npz(tmp_path / "good.npz", {"a.npy": GOOD, "b.npy": GOOD}, zipfile.ZIP_DEFLATED).read_bytes()
    path = tmp_path / "t.npz"
    for i in range(len(data)):
        for bits in (0x01, 0x88):
            path.write_bytes(data[:i] + bytes([data[i] ^ bits]) + data[i + 1 :])
            with suppress(GGUFError):
                assert all(x.dtype.kind in "fiu" for x in load_trace(path).arrays.values())


def test_a_small_trace_that_unpacks_to_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros(1 << 20, np.float32)
    np.savez_compressed(tmp_path / "t.npz", **{f"n-{i}": x for i in range(4)})
    assert len(load_trace(tmp_path / "t.npz").arrays) == 4
    monkeypatch.setattr(limits, "TRACE_BYTES", 1 << 23)
    with pytest.raises(GGUFError, match=r"unpacks to 16777\d+ bytes: up to 8388608 are read"):
        load_trace(tmp_path / "t.npz")
    np.savez(tmp_path / "t.npz", x=x, y=x, z=x)  # as large as its file
    assert len(load_trace(tmp_path / "t.npz").arrays) == 3
