"""The golden checkpoints: loaded as they are they give the transformers library's logits (float64); a GGUF file of one
holds the same metadata and the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pyggml.models import get_architecture

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.hf.config import Config
from pyggml.hf.families import find_family
from pyggml.hf.folder import open_hf_folder
from pyggml.learn.texts import Shape, TextGraph
from pyggml.llm.batch import Batch
from pyggml.llm.model import Model, load_model
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized
from pyggml.sched import Scheduler

from ..conftest import shared_dir

FOLDERS = shared_dir() / "golden" / "hf"
NMSE = {
    # Its checkpoint holds how fast heads fade, which follows from their number, rounded to bfloat16; the library takes
    # these.
    "minimax": 2.0**-18,
}
# Of tokens that the indexer of the last layer finds equal (all products are negative: 0) it chooses some; which ones,
# torch leaves open.
TIES = {"deepseek-v32": (19, 29)}


def _supported(name: str) -> bool:
    try:
        get_architecture(find_family(Config.of_folder(FOLDERS / name)).arch)
    except ModelError:
        return False
    return True


NAMES = sorted(p.name for p in FOLDERS.iterdir() if p.is_dir() and _supported(p.name)) if FOLDERS.is_dir() else []
pytestmark = pytest.mark.skipif(not FOLDERS.is_dir(), reason=f"no golden data in {FOLDERS}")


def _logits(model: Model, ids: np.ndarray) -> np.ndarray:
    """Of a batch of 24, then of single tokens."""
    ctx = model.new_context(n_ctx=64, n_batch=64, n_ubatch=64, type_k=DType.F32, type_v=DType.F32)
    batch = Batch()
    for i, token in enumerate(ids[:24]):
        batch.add(int(token), i, [0], logits=True)
    ctx.decode(batch)
    rows = [np.array(ctx.logits)]
    for token in ids[24:]:
        ctx.decode([int(token)])
        rows.append(np.array(ctx.logits))
    return np.concatenate(rows)


@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, golden: np.lib.npyio.NpzFile) -> None:
    model = load_model(FOLDERS / name, repack=False)
    assert not model.weights.unused
    ids = golden[f"{name}/tokens"]
    if f"{name}/hidden" in golden:  # of an encoder
        want, ctx = golden[f"{name}/hidden"], model.new_context(n_ctx=64)
        ctx.encode(ids.tolist())
        got = np.array(ctx.embeddings)
    else:
        want, got = golden[f"{name}/logits"], _logits(model, ids)
    rows = [i for i in range(len(want)) if i not in TIES.get(name, ())]
    got, want = got[rows], want[rows]
    assert ((got - want) ** 2).sum() <= NMSE.get(name, 1e-8) * (want**2).sum()


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_whole_text(name: str, golden: np.lib.npyio.NpzFile) -> None:
    """In a graph without memory, as training has it."""
    model = load_model(FOLDERS / name, repack=False)
    if f"{name}/logits" not in golden:
        pytest.skip("an encoder")
    ids, want = golden[f"{name}/tokens"], golden[f"{name}/logits"]
    encoder, decoder = (ids, golden[f"{name}/decoder_tokens"]) if f"{name}/decoder_tokens" in golden else ([], ids)
    graph = TextGraph(model.architecture, model.hparams, model.weights, Shape(1, len(decoder) + 3, len(encoder)))
    schedule = Scheduler(("cpu",)).alloc(graph.build.graph)
    graph.fill([decoder], [encoder])
    schedule.run()
    rows = [i for i in range(len(want)) if i not in TIES.get(name, ())]
    got, want = graph.logits.numpy()[rows], want[rows]
    assert ((got - want) ** 2).sum() <= NMSE.get(name, 1e-8) * (want**2).sum()


@pytest.fixture(scope="module")
def golden() -> np.lib.npyio.NpzFile:
    return np.load(FOLDERS / "logits.npz")


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_file_is_the_folder(name: str, tmp_path: Path) -> None:
    write_quantized(plan_quantization(FOLDERS / name, None), tmp_path / "m.gguf")
    folder = open_hf_folder(FOLDERS / name)
    model = load_model(tmp_path / "m.gguf", repack=False)
    assert set(model.tensors) == set(folder.tensors)
    for tensor in folder.tensors.values():
        rows = b"".join(r.tobytes() for r in tensor.rows(1000))
        assert (model.tensors[tensor.name].dtype, model.tensors[tensor.name].tobytes()) == (tensor.dtype, rows)
    for key, value in folder.kv.items():
        assert np.array_equal(model.kv[key], value), key  # pyright: ignore[reportArgumentType]
    assert type(model.kv["general.file_type"]) is int


def test_repacked_and_unmapped_are_the_same() -> None:
    ids = np.arange(3, 30)
    plain = _logits(load_model(FOLDERS / "mixtral", repack=False), ids)
    for options in ({"repack": True}, {"repack": False, "use_mmap": False}):
        assert ((_logits(load_model(FOLDERS / "mixtral", **options), ids) - plain) ** 2).sum() < 1e-10 * (
            plain**2
        ).sum()
