"""`pyggml quantize`: llama.cpp's types per tensor, the data, what is kept, and that no half file is ever seen."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from pyggml.models.hparams import HParams
from pyggml.tools.cli import main

import pyggml as gg
from pyggml.dtypes import DType
from pyggml.errors import DTypeError, GGUFError, ShapeError
from pyggml.gguf_io.read import open_gguf
from pyggml.llm.model import load_model
from pyggml.llm.quantize.imatrix import load_imatrix
from pyggml.llm.quantize.mixes import MIXES, Choice, file_type_name, find_mix, is_quantizable, tensor_type
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from ...gguf_files import write_all
from ...tiny_model import WriteModel

GOLDEN_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S"),
    *("Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4_MOE"),
)
GOLDEN = [("llama/llama2-F32", f"llama/llama2-{t}", t) for t in GOLDEN_TYPES] + [
    ("llama/mixtral-F16", "llama/mixtral-Q4_K_M", "Q4_K_M"),
    ("../models/stories260K-F16", "../models/stories260K-Q4_0", "Q4_0"),
    ("../models/stories260K-F16", "../models/stories260K-Q8_0", "Q8_0"),
]


@pytest.mark.parametrize(("source", "made", "name"), GOLDEN, ids=[f"{Path(m).name}" for _, m, _ in GOLDEN])
def test_types_are_llama_cpps(shared: Path, source: str, made: str, name: str) -> None:
    want = open_gguf(shared / "golden" / f"{made}.gguf")
    plan = plan_quantization(shared / "golden" / f"{source}.gguf", name)
    assert {t.source.name: t.dtype for t in plan.tensors} == {t.name: t.dtype for t in want.tensors.values()}
    assert plan.file_type == want.kv.get("general.file_type", 0)
    assert file_type_name(plan.file_type) == name


@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q8_0", "Q4_K_M", "TQ1_0"])
def test_written_file(shared: Path, tmp_path: Path, name: str) -> None:
    source, made = (shared / "golden" / "llama" / f"llama2-{t}.gguf" for t in ("F32", name))
    write_quantized(plan_quantization(source, name), tmp_path / "out.gguf")
    got, want = open_gguf(tmp_path / "out.gguf"), open_gguf(made)
    assert got.size == want.size
    for t in want.tensors.values():
        mine, theirs = got.tensor_bytes(t.name), want.tensor_bytes(t.name)
        if t.dtype in (DType.F32, DType.F16, DType.Q4_0, DType.Q8_0):  # the plain reference quantisers
            assert np.array_equal(mine, theirs), t.name
        else:
            x = open_gguf(source).tensor_bytes(t.name).view(np.float32).astype(np.float64)
            lost = [np.sum((gg.dequantize(data, t.dtype) - x) ** 2) for data in (mine, theirs)]
            assert lost[0] <= lost[1], t.name


def same(a: Any, b: Any) -> bool:
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


def test_metadata_is_kept(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    write_quantized(plan_quantization(tiny, "q4_k"), out)
    a, b = open_gguf(tiny), open_gguf(out)
    assert list(b.kv)[:-2] == list(a.kv) and all(same(a.kv[k], b.kv[k]) for k in a.kv)
    assert b.kv["general.file_type"] == MIXES["Q4_K_M"].file_type and b.kv["general.quantization_version"] == 2
    assert all(t.offset % b.alignment == 0 for t in b.tensors.values())
    fields = gguf.GGUFReader(out).fields  # another reader agrees, and types have not changed
    for key, field in gguf.GGUFReader(tiny).fields.items():
        assert key.startswith("GGUF.") or fields[key].types == field.types
    again = tmp_path / "again.gguf"
    write_quantized(plan_quantization(out, "F16", allow_requantize=True), again)
    assert list(open_gguf(again).kv) == list(b.kv)
    ctx = load_model(out).new_context(n_ctx=32)
    ctx.decode([1, 5])
    assert np.isfinite(ctx.logits).all()


def test_rows_that_do_not_divide(tiny: Path, write_model: WriteModel) -> None:
    types = {t.source.name: t.dtype for t in plan_quantization(tiny, "Q4_K_M").tensors}
    assert types["output.weight"] is DType.Q8_0  # n_embd 32
    assert types["blk.0.attn_q.weight"] is types["token_embd.weight"] is DType.Q5_0
    assert types["blk.1.ffn_down.weight"] is DType.Q8_0 and types["blk.0.attn_norm.weight"] is DType.F32
    path = write_model(kv={"llama.feed_forward_length": 72})
    odd = {t.source.name: t.dtype for t in plan_quantization(path, "Q4_0").tensors}
    assert odd["blk.0.ffn_down.weight"] is DType.F16 and odd["blk.0.ffn_up.weight"] is DType.Q4_0


def test_rules_of_the_mixes() -> None:
    """Some of llama.cpp's choices that the golden files do not show."""

    def chosen(name: str, tensor: str, layers: int, kv: int = 8, experts: int = 0, **options: Any) -> DType:
        hp = HParams(
            n_vocab=8, n_embd=256, n_layer=layers, n_head=8, n_ff=256, n_ctx_train=8, n_head_kv=kv, n_expert=experts,
            n_expert_used=min(experts, 2),
        )  # fmt: skip
        return tensor_type(Choice(MIXES[name], **options), hp, True, tensor, (256, 256, max(experts, 1), 1))

    assert [il for il in range(16) if chosen("Q4_K_M", f"blk.{il}.ffn_down.weight", 16) is DType.Q6_K] == [
        0, 1, 4, 7, 10, 13, 14, 15,
    ]  # fmt: skip
    assert chosen("Q3_K_M", "blk.0.attn_v.weight", 80, kv=1) is DType.Q5_K
    assert chosen("Q3_K_M", "blk.9.attn_v.weight", 80, kv=1) is DType.Q5_K  # 70B
    assert chosen("Q3_K_M", "blk.9.attn_v.weight", 32, kv=1) is DType.Q4_K
    assert chosen("Q5_K_S", "blk.9.attn_k.weight", 32, experts=8) is DType.Q8_0
    assert chosen("IQ2_S", "blk.9.attn_q.weight", 32) is DType.IQ2_XS
    assert chosen("IQ2_S", "blk.3.ffn_down_exps.weight", 32, experts=4) is DType.IQ3_S
    assert chosen("IQ3_XXS", "blk.9.ffn_down.weight", 32, has_imatrix=True) is DType.IQ3_XXS
    assert chosen("IQ3_XS", "blk.9.ffn_up.weight", 32) is DType.IQ3_XXS
    assert chosen("Q4_0", "blk.0.ffn_down.weight", 8, has_imatrix=True) is DType.Q4_1
    assert chosen("MXFP4_MOE", "blk.0.ffn_up_exps.weight", 8, experts=4) is DType.MXFP4
    assert chosen("MXFP4_MOE", "blk.0.ffn_up_shexp.weight", 8) is DType.Q8_0
    assert chosen("Q2_K", "blk.0.ffn_down.weight", 8, pure=True) is DType.Q2_K
    for fused in ("attn_qkv", "attn_kv_b"):  # counts as V
        assert chosen("Q4_K_M", f"blk.0.{fused}.weight", 8) is DType.Q6_K
        assert chosen("Q4_K_M", f"blk.2.{fused}.weight", 8) is DType.Q4_K
    assert chosen("Q4_K_M", "blk.0.ffn_down_shexp.weight", 8, experts=4) is DType.Q6_K
    assert chosen("IQ3_XXS", "blk.0.attn_k_b.weight", 8) is DType.IQ3_XXS  # no attn_k
    assert is_quantizable("blk.0.ffn_gate_up_exps.weight", (64, 64, 4, 1))
    for left in ("blk.0.ffn_gate_inp", "blk.0.ffn_gate_inp_shexp", "position_embd", "blk.0.attn_q_norm"):
        assert not is_quantizable(f"{left}.weight", (64, 1 if "shexp" in left else 64, 1, 1))
    assert chosen("Q2_K", "output.weight", 8, output_tensor_type=DType.F16) is DType.F16
    assert chosen("Q2_K", "token_embd.weight", 8, token_embedding_type=DType.Q8_0) is DType.Q8_0
    with pytest.raises(DTypeError, match=r"Q9_K.*Q4_K_M"):
        find_mix("Q9_K")


@pytest.mark.parametrize("name", sorted(MIXES))
def test_every_type_is_written(write_model: WriteModel, tmp_path: Path, name: str) -> None:
    wide = {"llama.embedding_length": 256, "llama.feed_forward_length": 256}
    plan = plan_quantization(write_model(kv=wide), name)
    write_quantized(plan, tmp_path / "out.gguf")
    assert {t.name: t.dtype for t in open_gguf(tmp_path / "out.gguf").tensors.values()} == {
        t.source.name: t.dtype for t in plan.tensors
    }
    assert bool(plan.without_imatrix) == name.startswith(("IQ1", "IQ2", "IQ3_X", "Q2_K_S"))


def test_requantizing(tiny: Path, tmp_path: Path) -> None:
    q8 = tmp_path / "q8.gguf"
    write_quantized(plan_quantization(tiny, "Q8_0"), q8)
    with pytest.raises(DTypeError, match="requantizing from type Q8_0 is disabled"):
        plan_quantization(q8, "Q4_0")
    write_quantized(plan_quantization(q8, "Q4_0", allow_requantize=True), tmp_path / "q4.gguf")
    write_quantized(plan_quantization(q8, "Q8_0"), tmp_path / "same.gguf")  # nothing to convert
    assert q8.read_bytes() == (tmp_path / "same.gguf").read_bytes()


def test_report(tiny: Path, tmp_path: Path) -> None:
    plan = plan_quantization(tiny, "Q4_1", report=True)
    write_quantized(plan, tmp_path / "out.gguf")
    f, g = open_gguf(tiny), open_gguf(tmp_path / "out.gguf")
    for t in plan.tensors:
        if t.error is None:
            assert t.source.ne[1] == 1
            continue
        x = f.tensor_bytes(t.source.name).view(np.float32).astype(np.float64)
        d = gg.dequantize(g.tensor_bytes(t.source.name), t.dtype) - x
        assert t.error.rmse == pytest.approx(np.sqrt(np.mean(d**2)))
        assert t.error.nmse == pytest.approx(np.sum(d**2) / np.sum(x**2))
        assert t.error.max_error == pytest.approx(np.abs(d).max())
        assert t.bits_per_weight == {DType.Q4_1: 5.0, DType.Q8_0: 8.5}[t.dtype]


# -- importance matrices


def write_imatrix(path: Path, values: dict[str, np.ndarray], counts: dict[str, list[float]]) -> Path:
    w = gguf.GGUFWriter(path, "imatrix")
    for name, v in values.items():
        c = np.array(counts[name], np.float32)[:, None]
        w.add_tensor(name + ".in_sum2", (v * np.maximum(c, 0)).astype(np.float32))
        w.add_tensor(name + ".counts", c)
    write_all(w)
    return path


def test_imatrix_files(tmp_path: Path) -> None:
    v = np.arange(1, 65, dtype=np.float32).reshape(2, 32)
    made = load_imatrix(write_imatrix(tmp_path / "i.gguf", {"a": v, "b": v[:1]}, {"a": [4, 0], "b": [2]}))
    assert np.array_equal(made["a"], [v[0], np.ones(32)]) and np.array_equal(made["b"], v[:1])
    old = tmp_path / "i.dat"
    old.write_bytes(struct.pack("<ii1sii", 1, 1, b"b", 2, 32) + (2 * v[0]).tobytes())
    assert np.array_equal(load_imatrix(old)["b"], v[:1])
    for data in (b"", b"\1\0\0\0", struct.pack("<ii1sii", 1, 1, b"b", 2, -1), b"\xff" * 40):
        old.write_bytes(data)
        with pytest.raises(GGUFError):
            load_imatrix(old)
    old.write_bytes(struct.pack("<ii1sii", 1, 1, b"b", 2, 32) + b"\1\0\x80\x7f" * 32)  # NaN that NumPy warns of
    with pytest.raises(GGUFError, match="of b holds values that are not finite"):
        load_imatrix(old)


def test_an_imatrix_with_a_tensor_twice(tmp_path: Path) -> None:
    (old := tmp_path / "i.dat").write_bytes(
        struct.pack("<i", 2) + (struct.pack("<i1sii4f", 1, b"b", 2, 4, *range(4)) * 2)
    )
    with pytest.raises(GGUFError, match="of b occurs twice"):
        load_imatrix(old)


@pytest.mark.parametrize(("value", "count"), [(1, -4), (1, np.nan), (1, np.inf), (-1, 4)])
def test_an_imatrix_with_numbers_that_are_none(tmp_path: Path, value: float, count: float) -> None:
    """They were columns that weigh less than nothing, or a ValueError when the file was merged with others."""
    values = np.full((1, 32), value, np.float32)
    path = write_imatrix(tmp_path / "i.gguf", {"a": values}, {"a": [count]})
    with pytest.raises(GGUFError, match=r"of a has a sum below 0, or a count that is none|of a holds values that are"):
        load_imatrix(path)


def test_imatrix_guides_the_search(tiny: Path, tmp_path: Path) -> None:
    name = "blk.0.attn_q.weight"
    weights = np.where(np.arange(32) < 4, 100.0, 0.01)[None].astype(np.float32)

    def first_columns(**options: Any) -> float:
        write_quantized(plan_quantization(tiny, "Q4_0", **options), tmp_path / "out.gguf")
        x = open_gguf(tiny).tensor_bytes(name).view(np.float32).reshape(-1, 32)
        y = gg.dequantize(open_gguf(tmp_path / "out.gguf").tensor_bytes(name), DType.Q4_0).reshape(-1, 32)
        return float(np.sum((x - y)[:, :4] ** 2))

    assert first_columns(imatrix={name: weights}) < 0.5 * first_columns()
    with pytest.raises(ShapeError, match="imatrix size 31 is different from tensor size 32"):
        plan_quantization(tiny, "Q4_0", imatrix={name: weights[:, 1:]})


# -- the output appears whole or not at all


def test_output_is_not_the_input(tiny: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.gguf"
    link.symlink_to(tiny)
    for out in (tiny, link):
        with pytest.raises(GGUFError, match="the output is the input"):
            write_quantized(plan_quantization(tiny, "Q8_0"), out)
    with pytest.raises(GGUFError, match="cannot be written"):
        write_quantized(plan_quantization(tiny, "Q8_0"), tmp_path / "no folder" / "out.gguf")


@pytest.mark.parametrize("named", [False, True], ids=["O_TMPFILE", "named"])
def test_failure_leaves_what_was_there(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    if named:
        monkeypatch.delattr(os, "O_TMPFILE")
    source, out = tmp_path / "nan.gguf", tmp_path / "out.gguf"
    data = bytearray(tiny.read_bytes())
    at = open_gguf(tiny).tensors["blk.1.ffn_down.weight"].offset
    data[at : at + 4] = struct.pack("<f", float("nan"))
    source.write_bytes(data)
    out.write_text("before")
    with pytest.raises(GGUFError, match=r"blk\.1\.ffn_down\.weight: a weight is not a finite number"):
        write_quantized(plan_quantization(source, "Q8_0"), out)
    assert out.read_text() == "before" and sorted(p.name for p in tmp_path.iterdir()) == ["nan.gguf", "out.gguf"]
    write_quantized(plan_quantization(tiny, "Q8_0"), out)
    assert open_gguf(out).tensors and sorted(p.name for p in tmp_path.iterdir()) == ["nan.gguf", "out.gguf"]


@pytest.mark.parametrize("before", [None, b"before"])
def test_killed_run_leaves_no_half_file(tiny: Path, tmp_path: Path, before: bytes | None) -> None:
    out = tmp_path / "out.gguf"
    if before is not None:
        out.write_bytes(before)
    code = (
        "import os, signal, sys\n"
        "from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized\n"
        "kill = lambda done, total: done * 2 > total and os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_quantized(plan_quantization(sys.argv[1], 'Q4_0'), sys.argv[2], progress=kill)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tiny, out], check=False, timeout=600)
    assert done.returncode == -signal.SIGKILL
    assert (out.read_bytes() if out.exists() else None) == before
    left = [p.name for p in tmp_path.iterdir() if p != out]
    assert all(name.startswith(".out.gguf.") and name.endswith(".tmp") for name in left)


# -- command line


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in args])
    return int(e.value.code or 0)


def test_command(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.gguf"
    assert run("quantize", tiny, out, "Q8_0", "--report", "--json", "-t", 1) == 0
    about = json.loads(capsys.readouterr().out)
    assert about["file_type"] == "Q8_0" and about["bytes_after"] < about["bytes_before"]
    row = next(t for t in about["tensors"] if t["name"] == "output.weight")
    assert (row["from"], row["to"], row["bits_per_weight"]) == ("F32", "Q8_0", 8.5) and 0 < row["nmse"] < 1e-4
    out.unlink()
    assert run("quantize", tiny, out, "q8_0", "--dry-run", "--output-tensor-type", "f16") == 0
    assert not out.exists() and "output.weight" in capsys.readouterr().out
    assert run("quantize", tiny, out, "Q4_0", "--report") == 0
    shown = capsys.readouterr().out
    assert "…" not in shown and "blk.0.ffn_down.weight" in shown
    assert run("quantize", tiny, out, "Q4_0", "--tensor-type", "attn_v=q8_0", "--leave-output-tensor", "--json") == 0
    rows = {t["name"]: t["to"] for t in json.loads(capsys.readouterr().out)["tensors"]}
    assert rows["blk.0.attn_v.weight"] == "Q8_0" and rows["output.weight"] == "F32"
    copy = tmp_path / "copy.gguf"
    assert run("quantize", out, copy, "copy") == 0 and "COPY" in capsys.readouterr().out
    assert open_gguf(copy).kv["general.file_type"] == open_gguf(out).kv["general.file_type"]
    for name in open_gguf(out).tensors:
        assert np.array_equal(open_gguf(copy).tensor_bytes(name), open_gguf(out).tensor_bytes(name))


def test_command_errors(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("quantize", tiny, tmp_path / "o", "Q9") == 2
    assert run("quantize", tiny, tmp_path / "o", "Q8_0", "--output-tensor-type", "x") == 2
    assert run("quantize", tiny, tmp_path / "o", "Q8_0", "--tensor-type", "attn") == 2
    assert run("quantize", tmp_path / "none", tmp_path / "o", "Q8_0") == 1
    assert run("quantize", tiny, tiny, "Q8_0") == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("pyggml: ") and lines[-1].endswith("the output is the input; name another file")


def test_bench_history(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q8, history = tmp_path / "q8.gguf", tmp_path / "history.jsonl"
    write_quantized(plan_quantization(tiny, "Q8_0"), q8)
    for _ in range(2):
        assert run("bench", "-m", q8, "-p", 4, "-n", 2, "-r", 2, "-t", 1, "--history", history) == 0
    rows = [json.loads(line) for line in history.read_text().splitlines()]
    assert [r["test"] for r in rows] == ["pp4", "tg2"] * 2
    keys = {"date", "commit", "cpu", "isa", "model", "type", "test", "n_threads", "samples_ts", "avg_ts"}
    assert keys <= rows[0].keys() and (rows[0]["model"], rows[0]["type"]) == ("q8.gguf", "Q8_0")
    assert len(rows[0]["samples_ts"]) == 2 and rows[0]["cpu"]
    capsys.readouterr()
    assert run("bench", "-m", q8, "-p", 4, "-n", 2, "-d", 9, "-r", 1, "-t", 1, "--json") == 0
    assert [r["test"] for r in json.loads(capsys.readouterr().out)] == ["pp4@d9", "tg2@d9"]


def test_types_by_pattern_and_what_is_left(tiny: Path) -> None:
    def types(name: str, **options: Any) -> dict[str, DType]:
        return {t.source.name: t.dtype for t in plan_quantization(tiny, name, **options).tensors}

    plain = types("Q4_0")
    asked = types("Q4_0", tensor_types=[(r"blk\.1\..*ffn_(up|gate)", DType.Q8_0), ("FFN", DType.Q5_0)])
    changed = {name for name in plain if asked[name] is not plain[name]}
    assert changed == {f"blk.{il}.ffn_{part}.weight" for il in (0, 1) for part in ("up", "gate", "down")}
    assert asked["blk.1.ffn_up.weight"] is DType.Q8_0 and asked["blk.1.ffn_down.weight"] is DType.Q5_0
    assert types("Q4_0", leave_output_tensor=True)["output.weight"] is DType.F32 is not plain["output.weight"]
    for pattern in ("nothing", "norm", "("):
        with pytest.raises(DTypeError, match=r"no tensor that is quantised|is no regular expression"):
            types("Q4_0", tensor_types=[(pattern, DType.Q8_0)])
