"""KL divergence from saved log-probabilities, against its definition; the file is read back, refused where it lies."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from pyggml.tools.cli import main

from pyggml.errors import BatchError, GGUFError, ModelError
from pyggml.llm.batch import Batch
from pyggml.llm.evaluate.divergence import divergence
from pyggml.llm.evaluate.logits_file import LogitsFile
from pyggml.llm.evaluate.perplexity import perplexity
from pyggml.llm.model import Model, load_model
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from ...tiny_model import WriteModel

IDS = np.random.default_rng(5).integers(3, 259, 130).tolist()


def log_probs(model: Model, chunk: list[int]) -> np.ndarray:
    ctx, batch = model.new_context(32), Batch()
    for i, token in enumerate([1, *chunk[1:]]):
        batch.add(token, i, 0, True)
    ctx.decode(batch)
    x = ctx.logits.astype(np.float64)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


@pytest.fixture
def saved(tiny: Path, tmp_path: Path) -> Path:
    path = tmp_path / "base.kld"
    *_, result = perplexity(load_model(tiny), IDS, 32, save_logits=path)
    *_, plain = perplexity(load_model(tiny), IDS, 32)
    assert result == plain
    return path


def test_against_the_definition(tiny: Path, saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "q.gguf"
    write_quantized(plan_quantization(tiny, "Q4_0"), other)
    base, file = load_model(tiny), LogitsFile(saved)
    assert (file.n_ctx, file.n_vocab, file.n_chunks) == (32, 259, 4) and file.tokens.reshape(-1).tolist() == IDS[:128]
    *_, d = divergence(load_model(other), file)
    kld, diff, same, nll = [], [], [], []
    for i in range(4):
        chunk = IDS[32 * i : 32 * i + 32]
        p, q = log_probs(base, chunk), log_probs(load_model(other), chunk)
        for at, row in zip(range(16, 31), file.log_probs(i), strict=True):
            assert np.allclose(row, p[at], atol=2e-3)
            token = chunk[at + 1]
            kld.append(float((np.exp(p[at]) * (p[at] - q[at])).sum()))
            diff.append(np.exp(q[at, token]) - np.exp(p[at, token]))
            same.append(p[at].argmax() == q[at].argmax())
            nll.append((-q[at, token], -p[at, token]))
    assert np.allclose(d.kld, kld, atol=2e-3) and np.allclose(d.p_diff, diff, atol=1e-3)
    assert d.same_top.tolist() == [float(s) for s in same]
    a, b = np.array(nll).T
    assert d.ppl.value == pytest.approx(np.exp(a.mean()), rel=1e-3)
    assert d.ppl_base.value == pytest.approx(np.exp(b.mean()), rel=1e-3)
    error = np.sqrt((a.var() + b.var() - 2 * np.cov(a, b, bias=True)[0, 1]) / (len(a) - 1))
    assert d.log_ratio.value == pytest.approx((a - b).mean(), abs=1e-3) and d.log_ratio.error == pytest.approx(
        error, rel=0.1
    )
    assert d.correlation == pytest.approx(np.corrcoef(a, b)[0, 1], abs=1e-2)
    assert d.difference.value == pytest.approx(d.ppl.value - d.ppl_base.value)
    assert d.p_rms.value == pytest.approx(np.sqrt((np.array(diff) ** 2).mean()), rel=0.05)


def test_a_model_is_near_itself(tiny: Path, saved: Path) -> None:
    *_, d = divergence(load_model(tiny), LogitsFile(saved))
    assert np.abs(d.kld).max() < 1e-4 and d.top.value == 1 and abs(d.ratio.value - 1) < 1e-3


def test_files_that_lie(tiny: Path, saved: Path, tmp_path: Path, write_model: WriteModel) -> None:
    data, bad = saved.read_bytes(), tmp_path / "bad"
    for text, what in (
        (data[:-4], "truncated"),
        (data[:12], "is no file"),
        (b"GGUF" + data, "is no file"),
        (b"", "no file"),
        (b"_logits_" + struct.pack("<III", 2**32 - 1, 2**32 - 1, 0), "truncated: 0 chunks"),
    ):
        bad.write_bytes(text)
        with pytest.raises(GGUFError, match=what):
            LogitsFile(bad)
    with pytest.raises(GGUFError, match="cannot be read"):
        LogitsFile(tmp_path / "none")
    with pytest.raises(BatchError, match="not with a stride"):
        perplexity(load_model(tiny), IDS, 32, stride=8, save_logits=bad)
    bad.write_bytes(data.replace((259).to_bytes(4, "little"), (257).to_bytes(4, "little"), 1))
    with pytest.raises(ModelError, match="the base has 257 tokens"):
        divergence(load_model(tiny), LogitsFile(bad))


def test_on_the_command_line(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*args: object, code: int = 0) -> str:
        with pytest.raises(SystemExit) as e:
            main(["perplexity", "-m", str(tiny), "-t", "1", *map(str, args)])
        got = capsys.readouterr()
        assert e.value.code == code, got.err
        return got.out or got.err

    (tmp_path / "t.txt").write_text("abcdefgh" * 40)
    base = ("--kl-divergence-base", tmp_path / "b")
    assert "Final estimate: PPL" in run("-f", tmp_path / "t.txt", "-c", 32, *base)
    shown = run("--kl-divergence", *base)
    for line in ("Mean PPL(Q)  ", "99.9%   KLD: ", "Median  Δp: ", "Same top p: 100.000", "   1  "):
        assert line in shown
    out = json.loads(run("--kl-divergence", *base, "--json"))
    assert out["same_top"]["value"] == 1 and out["kld_percentiles"]["99"] < 1e-4
    assert "needs --kl-divergence-base" in run("--kl-divergence", code=2)
    assert "-f is missing" in run(code=2)
