"""Adapters made on the fly: GGUF files, and PEFT folders beside checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from pyggml.dtypes import DType
from pyggml.llm.adapters.lora import TOKEN_EMBD
from pyggml.llm.batch import Batch
from pyggml.llm.context import LlamaContext
from pyggml.llm.loaded import LoadedModel

from ...gguf_files import write_all

Arrays = dict[str, npt.NDArray[Any]]
IDS = [3, 5, 9, 1, 7, 4, 4, 2]


def halves(model: LoadedModel, names: Iterable[str], rank: int = 4, seed: int = 1) -> Arrays:
    """Random A and B for weights of a model, by their names in a GGUF."""
    rng = np.random.default_rng(seed)
    made: Arrays = {}
    for name in names:
        n, m, *more = model.weights[name].ne
        outer = tuple(x for x in more[::-1] if x > 1)
        a, b = ((m, rank), (n, rank)) if name == TOKEN_EMBD else ((rank, n), (m, rank))
        made[f"{name}.lora_a"] = rng.standard_normal((*outer, *a)).astype(np.float32) / np.float32(np.sqrt(n))
        made[f"{name}.lora_b"] = rng.standard_normal((*outer, *b)).astype(np.float32) / 4
    return made


def write_lora(path: Path, tensors: Mapping[str, npt.NDArray[Any]], arch: str = "llama", **kv: Any) -> Path:
    """An adapter as llama.cpp's converter writes it; `kv` replaces keys (with _ for .), None removes one."""
    keys = {"general_type": "adapter", "adapter_type": "lora", "adapter_lora_alpha": 8.0, **kv}
    w = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        if value is not None:
            (w.add_string if isinstance(value, str) else w.add_float32)(key.replace("_", "."), value)
    for name, array in tensors.items():
        w.add_tensor(name, array)
    write_all(w)
    return path


def write_safetensors(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """F32 arrays as a *.safetensors file."""
    header: dict[str, Any] = {}
    data = b""
    for name, a in arrays.items():
        end = len(data) + a.nbytes
        header[name] = {"dtype": "F32", "shape": list(a.shape), "data_offsets": [len(data), end]}
        data += np.ascontiguousarray(a, np.float32).tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_peft(folder: Path, tensors: Mapping[str, npt.NDArray[Any]], **config: Any) -> Path:
    """A PEFT folder; names without `base_model.model.`."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, **config}))
    write_safetensors(folder / "adapter_model.safetensors", {f"base_model.model.{n}": a for n, a in tensors.items()})
    return folder


def logits(ctx: LlamaContext, ids: Sequence[int] = IDS, seqs: Sequence[int] = (0,)) -> npt.NDArray[np.float64]:
    """Those of all tokens, in an empty cache; of several sequences with the same tokens one after the other."""
    ctx.memory.clear()
    batch = Batch()
    for seq in seqs:
        for pos, token in enumerate(ids):
            batch.add(token, pos, [seq], logits=True)
    ctx.decode(batch)
    return ctx.logits.astype(np.float64)


def fresh(model: LoadedModel, **options: Any) -> LlamaContext:
    """A context with a cache in F32."""
    return LlamaContext(model, 64, type_k=DType.F32, type_v=DType.F32, **options)


def distance(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> float:
    """NMSE."""
    x, y = got.astype(np.float64), want.astype(np.float64)
    return float(((x - y) ** 2).sum() / (y**2).sum())
