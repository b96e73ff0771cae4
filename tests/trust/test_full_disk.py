"""A disk that fills while a file is written: the error names that file, and what was there stays as it was."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import pyggml as gg
from pyggml.hf.export import export_folder
from pyggml.inspect.trace import Trace, save_trace
from pyggml.llm.generate.request_file import RequestFile
from pyggml.llm.quantize.imatrix import ImatrixSums, save_dat, save_sums
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from ..tiny_model import write_gguf

resource = pytest.importorskip("resource")


@contextmanager
def no_file_longer_than(size: int) -> Generator[None]:
    """A write beyond `size` fails, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_each_writer_names_its_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    path = write_gguf(tmp_path / "m.gguf")
    model = gg.load_model(path)
    sums = ImatrixSums(chunk_size=512)
    sums.add("blk.0.attn_q.weight", np.ones((1, 3200)), np.ones(1))
    values = Trace({"a": np.random.default_rng(1).random((64, 64), np.float32)}, {"prompt": "x"})
    lora = model.trainer(gg.AdamW(), gg.LoRA(r=2, alpha=4, targets=("attn_q",)), n_threads=1)
    writers: dict[str, Callable[[Path], object]] = {
        "sums.gguf": lambda x: save_sums(x, sums),
        "sums.dat": lambda x: save_dat(x, sums),
        "trace.npz": lambda x: save_trace(values, x),
        "q.gguf": lambda x: write_quantized(plan_quantization(path, "Q8_0"), x),
        "folder": lambda x: export_folder(path, x),
        "lora.gguf": lora.save,
        "peft": lora.save,
    }
    for name, write in writers.items():
        with pytest.raises((OSError, gg.GGMLError)) as e, no_file_longer_than(1000):
            write(out / name)
        assert str(out / name) in str(e.value) and "too large" in str(e.value), name
        assert not list(out.iterdir()), name
        write(out / name)
        (out / name).rename(tmp_path / name)


def test_results_of_a_batch(tmp_path: Path) -> None:
    """Those that have been written stay, whole, and the next run goes on from there."""
    requests, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text("".join(json.dumps({"prompt": "Once", "n_predict": n}) + "\n" for n in range(1, 9)))
    model = gg.load_model()

    def answer() -> int:
        with RequestFile(requests, results) as file:
            done = file.n_done
            for _ in file.run(lambda todo: gg.batch(model, todo, n_parallel=1, n_threads=1, temp=0.0)):
                pass
            return done

    with pytest.raises(OSError, match=r"too large: .*out\.jsonl"), no_file_longer_than(600):
        answer()
    lines = results.read_bytes().split(b"\n")
    assert lines.pop() == b"" and 0 < len(lines) < 8
    assert [json.loads(line)["index"] for line in lines] == [*range(len(lines))]
    assert answer() == len(lines)
    assert [json.loads(line)["index"] for line in results.read_text().splitlines()] == [*range(8)]
