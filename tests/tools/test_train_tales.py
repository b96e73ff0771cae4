"""The script that trains the model that ships with pyggml, on a small scale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pyggml.tools.train import train_tales
from pyggml.tools.train.tales_model import HParams

import pyggml as gg

HP = HParams(n_vocab=400, n_ctx=32, n_embd=32, n_layer=1, n_head=2, n_head_kv=1, n_ff=64)


@pytest.fixture
def text(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(train_tales, "HParams", lambda: HP)
    monkeypatch.setattr(train_tales, "write_samples", lambda *args: None)  # slow
    monkeypatch.setattr(train_tales, "hold_out", lambda tales, *args: (tales[1:], [tales[0][:1500]]))  # all are long
    path = tmp_path / "tales.txt"
    path.write_text((shared / "data" / "tales.txt").read_text("utf-8")[:60_000], "utf-8")
    return path


def run(text: Path, out: Path, *args: object) -> None:
    more = ["--steps", 4, "--batch", 2, "--eval-every", 2, "--warmup", 1, *args]
    assert train_tales.main([str(text), "--out", str(out), *map(str, more)]) == 0


def test_a_training_that_ended_goes_on_to_the_same_bits(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(text, whole)
    batches = train_tales.batches

    def few(*args: object) -> Iterator[list[list[int]]]:
        for i, batch in enumerate(batches(*args)):  # type: ignore[arg-type]
            if i == 3:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(train_tales, "batches", few)
        run(text, parts)
    run(text, parts, "--resume")
    assert (whole / "tales-Q8_0.gguf").read_bytes() == (parts / "tales-Q8_0.gguf").read_bytes()
    logs = [(folder / "log.tsv").read_text().splitlines() for folder in (whole, parts)]
    assert [[row.split("\t")[5:] for row in log] for log in logs] == [[row.split("\t")[5:] for row in logs[0]]] * 2
    assert [row.split("\t")[0] for row in logs[1]] == ["step", "2", "4"]
    model = gg.load_model(whole / "tales-Q8_0.gguf")
    assert model.kv["general.license"] == "mit"


def test_means_begin_with_the_first_steps_alone(tiny: Path) -> None:
    trainer = gg.load_model(tiny).trainer(gg.SGD(lr=0.1))
    means, w = train_tales.Mean(trainer, 0.9), trainer.params["output_norm.weight"]
    seen: list[np.ndarray] = []
    for _ in range(3):
        trainer.step([[1, 70, 71, 72]])
        seen.append(w.numpy().copy())
        means.add()
    weights = 0.9 ** np.arange(2, -1, -1)
    expected = np.average(seen, axis=0, weights=weights)
    with means.applied():
        assert np.allclose(w.numpy(), expected, rtol=1e-6)
    assert w.numpy().tobytes() == seen[-1].tobytes()


def test_the_rate_rises_and_falls() -> None:
    rate = train_tales.rate(1.0, 10, 100)
    rates = [rate(step) for step in range(100)]
    assert 0 < rates[0] < rates[9] < 1 and rates[9] == max(rates)
    assert rates[99] == pytest.approx(0.02)
