"""Loading: what a model knows, and errors that say what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyggml.tools.info import info

import pyggml as gg
from pyggml.errors import GGUFError, KVCacheFull, ModelError
from pyggml.llm.model import load_model
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from ..conftest import shared_dir
from ..tiny_model import WriteModel

FOLDER = shared_dir() / "golden" / "hf"


def test_model(tiny: Path) -> None:
    model = load_model(tiny)
    assert model.arch == "llama" and model.hparams.n_layer == 2 and model.vocab.n_tokens == 259
    t = model.tensors["blk.0.attn_q.weight"]
    assert t.ne == (32, 32, 1, 1) and t.buffer is not None and t.buffer.buft == "CPU_MMAP"
    assert not t.numpy().flags.writeable
    assert all(t.buffer is other.buffer for other in model.tensors.values())
    assert model.tokenize("é")[-2:] == [3 + 0xC3, 3 + 0xA9] and model.detokenize([3 + 0xC3, 3 + 0xA9]) == "é"


def test_without_mmap(tiny: Path) -> None:
    a, b = load_model(tiny), load_model(tiny, use_mmap=False)
    for name, t in a.tensors.items():
        assert (t.numpy() == b.tensors[name].numpy()).all()


def test_vocab_only(tiny: Path) -> None:
    model = load_model(tiny, vocab_only=True)
    assert not model.tensors and model.hparams.n_embd == 32
    assert model.tokenize("a")[0] == 1
    with pytest.raises(ModelError, match="vocab_only"):
        model.new_context()


def test_overrides(tiny: Path) -> None:
    model = load_model(tiny, kv_overrides={"llama.rope.freq_base": 500.0, "llama.context_length": 64})
    assert (model.hparams.rope_freq_base, model.hparams.n_ctx_train) == (500.0, 64)
    with pytest.raises(GGUFError, match="override"):
        load_model(tiny, kv_overrides={"llama.context_length": "many"})


def test_tensors_that_nothing_asks_for_are_reported(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_model(tiny).weights.unused == [] and not caplog.records
    model = load_model(tiny, kv_overrides={"llama.block_count": 1})
    assert len(model.weights.unused) == 9 and all(n.startswith("blk.1.") for n in model.weights.unused)
    (record,) = caplog.records
    assert record.name == "pyggml" and str(tiny) in record.getMessage() and "blk.1.attn_q.weight" in record.getMessage()


def test_info_says_what_nothing_asks_for(write_model: WriteModel, capsys: pytest.CaptureFixture[str]) -> None:
    info(str(write_model(extra=("odd.weight",))), as_json=True)
    assert json.loads(capsys.readouterr().out)["unused"] == ["odd.weight"]
    info(str(write_model(arch="gpt7")), as_json=True)
    assert "'gpt7' is not supported" in json.loads(capsys.readouterr().out)["problem"]


@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no golden data in {FOLDER}")
def test_info_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same of a folder and of the GGUF that is made of it, but for what a file alone has."""
    write_quantized(plan_quantization(FOLDER / "llama31", None), tmp_path / "m.gguf")
    found: list[dict[str, Any]] = []
    for path in (tmp_path / "m.gguf", FOLDER / "llama31"):
        info(str(path), as_json=True)
        found.append(json.loads(capsys.readouterr().out))
    file, folder = found
    assert file["problem"] is None and folder["version"] == 0
    assert folder["size"] == (FOLDER / "llama31" / "model.safetensors").stat().st_size
    for key in ("n_params", "types", "unused", "problem"):
        assert file[key] == folder[key]
    names = [{t["name"]: t for t in about["tensors"]} for about in found]
    assert names[0] == names[1]
    made = {k for k in file["metadata"] if k not in folder["metadata"]}
    assert made <= {"general.file_type", "general.quantization_version"}
    info(str(FOLDER / "llama31"))
    assert "Hugging Face folder of llama" in capsys.readouterr().out
    with pytest.raises(ModelError, match=r"has no config\.json: neither a GGUF file nor a Hugging Face folder"):
        info(str(tmp_path))


def test_progress(tiny: Path) -> None:
    seen: list[float] = []
    load_model(tiny, progress=lambda f: seen.append(f) or True)
    assert seen[0] == 0.0 and seen[-1] == 1.0 and seen == sorted(seen)
    with pytest.raises(ModelError, match="cancelled"):
        load_model(tiny, progress=lambda f: f < 0.5)


def test_tied_output(write_model: WriteModel) -> None:
    model = load_model(write_model(optional=()))
    assert "output.weight" not in model.weights
    ctx = model.new_context(n_ctx=32)
    ctx.decode([1, 5])
    assert np.isfinite(ctx.logits).all()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"arch": "gpt7"}, r"architecture 'gpt7' is not supported; of the \d+ that are, like it: .*gpt2"),
        ({"drop": ("blk.1.ffn_up.weight",)}, r"no tensor blk\.1\.ffn_up\.weight"),
        ({"drop": ("token_embd.weight",)}, r"no tensor token_embd\.weight"),
        ({"ne": {"blk.0.attn_k.weight": (32, 24)}}, r"blk\.0\.attn_k\.weight has ne \[32, 24, 1, 1\]"),
        ({"ne": {"output_norm.weight": (31,)}}, r"output_norm\.weight has ne \[31"),
        ({"kv": {"llama.vocab_size": 300}}, r"token_embd\.weight has ne \[32, 259, 1, 1\].*\[32, 300"),
        ({"kv": {"llama.rope.scaling.type": "odd"}}, r"llama\.rope\.scaling\.type is 'odd'"),
    ],
)
def test_bad_models_are_refused(write_model: WriteModel, changes: dict[str, object], text: str) -> None:
    path = write_model(**changes)
    with pytest.raises(ModelError, match=text) as e:
        load_model(path)
    assert str(path) in str(e.value)


def test_truncated_file(tiny: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(tiny.read_bytes()[:-5000])
    with pytest.raises(GGUFError, match=r"short\.gguf"):
        load_model(short)


def test_generate_is_reproducible_and_streams(tiny: Path) -> None:
    model = load_model(tiny)
    greedy = ["".join(model.generate("ab", n_predict=12, temp=0)) for _ in range(2)]
    assert greedy[0] == greedy[1] != ""
    drawn = ["".join(model.generate("ab", n_predict=12, temp=2.0, seed=s, top_k=0, top_p=1.0)) for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert list(model.generate("ab", n_predict=0)) == []
    assert "".join(model.generate([1, 100], n_predict=-1, temp=0, n_ctx=32)) != ""
    with pytest.raises(KVCacheFull):
        list(model.generate("a" * 60, n_predict=1, n_ctx=32))


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "ref"])
def test_weights_are_not_written_to(tiny: Path, use_mmap: bool, backend: str) -> None:
    model = gg.load_model(tiny, use_mmap=use_mmap)
    w = model.tensors["output_norm.weight"]
    before = w.tobytes()
    one = gg.Context().from_numpy(np.ones(w.ne[0], np.float32))
    row = gg.Context().from_numpy(np.zeros(1, np.int32))
    for t in (gg.scale_inplace(w, 2.0), gg.cpy(one, w), gg.set_rows(w, one, row), gg.dup_inplace(gg.view_1d(w, 8, 0))):
        with pytest.raises(gg.BackendError, match=r"output_norm.weight.*read-only(?s:.*)test_model.py"):
            gg.compute(gg.Graph().build_forward_expand(t), backend=backend)
    with pytest.raises(gg.AllocError, match="read-only"):
        w.set(np.ones(w.ne[0]))
    assert w.tobytes() == before
