"""Importance matrices that are measured, against the inputs themselves, and their files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from pyggml.tools.cli import main

from pyggml.errors import BatchError, GGUFError, ShapeError
from pyggml.llm.batch import Batch
from pyggml.llm.evaluate.imatrix import measure_imatrix
from pyggml.llm.model import load_model
from pyggml.llm.quantize.imatrix import ImatrixSums, load_imatrix, load_sums, save_dat, save_sums

IDS = np.random.default_rng(5).integers(3, 259, 130).tolist()


def measured(path: Path, n_chunks: int = -1, first: int = 0, **options: bool) -> ImatrixSums:
    sums = ImatrixSums(32)
    steps = list(measure_imatrix(load_model(path), IDS, sums, n_chunks, first, **options))
    assert [s.n_done for s in steps] == list(range(1, len(steps) + 1))
    return sums


def squares(rows: np.ndarray) -> np.ndarray:
    return (rows.astype(np.float64) ** 2).sum(axis=0)


def test_sums_are_those_of_the_inputs(tiny: Path) -> None:
    model, chunks = load_model(tiny), [[model_bos := 1, *IDS[i + 1 : i + 32]] for i in (0, 32, 64, 96)]
    assert model.vocab.bos == model_bos
    sums = measured(tiny, process_output=True)
    assert len(sums.sums) == 2 * 7 + 1 and sums.n_chunks == 4
    inputs = {
        "blk.0.attn_q.weight": "attn_norm-0",
        "blk.1.attn_output.weight": "kqv_merged_cont-1",
        "blk.1.ffn_up.weight": "ffn_norm-1",
        "output.weight": "result_norm",
    }
    with model.tap(*inputs.values()) as tap:
        ctx = model.new_context(32, n_batch=32)
        for chunk in chunks:
            ctx.memory.clear()
            batch = Batch()
            for i, token in enumerate(chunk):
                batch.add(token, i, 0, True)
            ctx.decode(batch)
    for weight, node in inputs.items():
        rows = np.concatenate([a.reshape(-1, a.shape[-1]) for a in tap[node]])
        assert sums.counts[weight].tolist() == [128]
        assert np.allclose(sums.sums[weight], squares(rows), rtol=1e-4), weight


def test_experts_count_by_themselves(shared: Path) -> None:
    path = shared / "golden" / "llama" / "mixtral-F16.gguf"
    model = load_model(path)
    ids = [i % model.hparams.n_vocab for i in IDS]
    sums = ImatrixSums(32)
    list(measure_imatrix(model, ids, sums, 2, with_perplexity=False))
    with model.tap("ffn_moe_topk-0", "ffn_norm-0") as tap:
        ctx = model.new_context(32, n_batch=32)
        for i in (0, 32):
            ctx.memory.clear()
            batch = Batch()
            chunk = ids[i : i + 32]
            if model.vocab.add_bos:
                chunk[0] = model.vocab.bos
            for j, token in enumerate(chunk):
                batch.add(token, j, 0, True)
            ctx.decode(batch)
    rows, chosen = np.concatenate(tap["ffn_norm-0"]), np.concatenate(tap["ffn_moe_topk-0"])
    got = sums.sums["blk.0.ffn_up_exps.weight"]
    assert got.shape[0] == 8 and sums.counts["blk.0.ffn_up_exps.weight"].sum() == 2 * 64
    for expert in range(8):
        mine = rows[(chosen == expert).any(axis=1)]
        assert sums.counts["blk.0.ffn_up_exps.weight"][expert] == len(mine)
        assert np.allclose(got[expert], squares(mine), rtol=1e-4)
    assert sums.sums["blk.0.ffn_down_exps.weight"].shape[0] == 8


def test_files_and_going_on(tiny: Path, tmp_path: Path) -> None:
    """Two halves, one after the other or merged, are the whole."""
    whole, half = measured(tiny, 4), measured(tiny, 2)
    half.datasets = ["first.txt"]
    save_sums(tmp_path / "half.gguf", half)
    again = load_sums(tmp_path / "half.gguf")
    assert again.datasets == ["first.txt"] and again.chunk_size == 32 and again.n_chunks == 2
    list(measure_imatrix(load_model(tiny), [*IDS[64:], *IDS], again, 2))
    for name, sums in whole.sums.items():
        assert np.allclose(again.sums[name], sums, rtol=1e-6) and again.counts[name] == whole.counts[name]
    rest = measured(tiny, 2, 1)  # tokens 32 to 96
    rest.merge(load_sums(tmp_path / "half.gguf"))
    assert rest.n_chunks == 4
    fields = gguf.GGUFReader(tmp_path / "half.gguf").fields
    assert fields["general.type"].contents() == "imatrix" and fields["imatrix.chunk_count"].contents() == 2
    assert fields["imatrix.chunk_size"].contents() == 32 and fields["imatrix.datasets"].contents() == ["first.txt"]
    save_dat(tmp_path / "half.dat", half)
    old, new = load_imatrix(tmp_path / "half.dat"), load_imatrix(tmp_path / "half.gguf")
    assert all(np.allclose(old[name], new[name], rtol=1e-5) for name in new)
    with pytest.raises(ShapeError, match=r"imatrix: blk\.0\.attn_q\.weight has 3 columns"):
        half.add("blk.0.attn_q.weight", np.ones((1, 3)), np.ones(1))
    experts = ImatrixSums(4)
    experts.add("e", np.ones((1, 6)), np.array([2.0]))
    experts.add("e", np.ones((3, 2)), np.array([1.0, 0, 4]))
    assert experts.sums["e"].tolist() == [[2, 2]] * 3 and experts.counts["e"].tolist() == [3, 2, 6]


def test_on_the_command_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*args: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as e:
            main([str(a) for a in args])
        got = capsys.readouterr()
        assert e.value.code == code, got.err
        return got.out + got.err

    text, out = tmp_path / "t.txt", tmp_path / "i.gguf"
    text.write_text("abcdefgh" * 40)
    args = ("imatrix", "-m", tiny, "-f", text, "-c", 32, "-t", 1, "-o", out)
    done = run(*args, "--save-frequency", 4)
    assert "PPL = " in done and "14 tensors" in done and (tmp_path / "i.gguf.at_4").is_file()
    assert "PPL" not in run(*args, "--no-ppl", "--chunks", 2) and load_sums(out).n_chunks == 2
    assert "4 chunks" in run("imatrix", "--in-file", out, "--in-file", out, "-o", tmp_path / "both.gguf", "-c", 32)
    assert "attn_output" in run("imatrix", "--in-file", out, "--show-statistics")
    assert "--in-file" in run("imatrix", code=2)
    run("imatrix", "--in-file", out, "-o", tmp_path / "i.dat", "--output-format", "dat", "-c", 32)
    for made in ("i.gguf", "i.dat"):
        run("quantize", tiny, tmp_path / "q.gguf", "Q4_0", "--imatrix", tmp_path / made)


def test_what_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="need a text of 64; it has 40"):
        list(measure_imatrix(load_model(tiny), IDS[:40], ImatrixSums(32)))
    with pytest.raises(BatchError, match="too few to leave out 3 chunks"):
        list(measure_imatrix(load_model(tiny), IDS, ImatrixSums(32), first_chunk=3))
    with pytest.raises(GGUFError, match="holds no importance matrix"):
        load_sums(tiny)
