"""An array where a single value belongs: an exception that names the key. NumPy compares its elements, one by one."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyggml as gg
from pyggml.errors import GGMLError, GGUFError, ModelError, StateError
from pyggml.gguf_io.split import open_model
from pyggml.gguf_io.write import GGUFOut, kv_record
from pyggml.learn.new_model import write_new_model
from pyggml.llm.adapters.control import load_control_vector
from pyggml.llm.adapters.lora import load_lora_gguf
from pyggml.llm.model import load_model
from pyggml.llm.tower import open_tower_of
from pyggml.llm.vocab import Vocab
from pyggml.tensor import rank_of

from ..llm.adapters.make import write_peft
from ..tiny_model import write_gguf

ARRAYS = [np.array([1, 2], np.int32), np.zeros(0, np.float32)]
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the tiny model with other keys."""

    def written(**keys: Any) -> Path:
        file = open_model(write_gguf(tmp_path / "tiny.gguf"))
        more = {key.replace("__", "."): value for key, value in keys.items()}
        file.kv_spans.update(dict.fromkeys(more, (0, 0)))
        kept = [bytes(file.data[a:b]) for a, b in file.kv_spans.values() if b]
        tensors = [(t.name, t.dtype, t.ne[: rank_of(t.ne)]) for t in file.tensors.values()]
        path = tmp_path / "m.gguf"
        with GGUFOut(path, [*kept, *(kv_record(k, v) for k, v in more.items())], tensors, 32) as out:
            for name in file.tensors:
                out.write_tensor([file.tensor_bytes(name)])
        return path

    return written


@pytest.mark.parametrize("value", ARRAYS, ids=["two", "none"])
def test_files(write: Write, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    for keys in ({"pyggml__layout": value}, {"pyggml__layout": "r16", "pyggml__layout__version": value}):
        with pytest.raises(GGUFError, match="its weights are repacked in the layout"):
            open_model(write(**keys))
    for keys in ({"general__type": value}, {"general__type": "adapter", "adapter__type": value}):
        with pytest.raises(ModelError, match="is no LoRA adapter"):
            load_lora_gguf(write(**keys))
    path = write(general__architecture=value)
    with pytest.raises(ModelError, match="is no control vector"):
        load_control_vector(path)
    with pytest.raises(ModelError, match="no mmproj file"):
        open_tower_of(str(path), str(path), "vision")
    with pytest.raises(ModelError, match=r"general\.architecture is missing or no string"):
        write_new_model(path, path.with_name("new.gguf"))
    caplog.set_level(logging.INFO, "pyggml")
    with pytest.raises(ModelError, match="the file has no vocabulary"):  # what is loaded is logged
        load_model(write(tokenizer__ggml__model=value))


@pytest.mark.parametrize("value", ARRAYS, ids=["two", "none"])
def test_vocabularies(value: Any) -> None:
    kv = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.merges": ["a b"]}
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre is not a string"):
        Vocab.from_gguf({**kv, "tokenizer.ggml.pre": value})


@pytest.mark.parametrize("value", [*ARRAYS, "x", 1.5, -1, 0, 1 << 30], ids=str)
def test_counts_of_layers(write: Write, tmp_path: Path, value: Any) -> None:
    """Of adapters for models whose builders do not look at the key, and of new models, which nobody builds."""
    halves = {f"model.layers.0.self_attn.q_proj.lora_{x}.weight": np.ones(s, np.float32) for x, s in
              (("A", (4, 32)), ("B", (32, 4)))}  # fmt: skip
    adapter = write_peft(tmp_path / "peft", halves)
    model = load_model(write(llama__decoder_block_count=value))
    is_count = type(value) is int and value >= 0
    if is_count and value == 0:
        assert len(model.load_lora(adapter).pairs) == 1
    else:
        with pytest.raises(ModelError, match=r"the key llama\.decoder_block_count"):
            model.load_lora(adapter)
    if not is_count:
        with pytest.raises(GGMLError, match=r"the key llama\.block_count"):
            write_new_model(write(llama__block_count=value), tmp_path / "new.gguf")
    else:
        write_new_model(write(llama__block_count=value), tmp_path / "new.gguf")


def test_states_of_trainings(tmp_path: Path) -> None:
    """Arrays, JSON that is nested deeply, and more steps than the training has, whose numbers would be looked at."""
    model, texts = load_model(write_gguf(tmp_path / "tiny.gguf")), [[1, 5, 6, 7]] * 4

    def fit(epochs: int, **states: Any) -> None:
        model.trainer(gg.AdamW(1e-3), n_ctx=8).fit(texts, epochs=epochs, n_batch=4, **states)

    fit(1, state=tmp_path / "s")
    state, changed = gg.load(tmp_path / "s"), tmp_path / "c"
    for key in state.metadata:
        for value in (*ARRAYS, '{"a":' * 100_000, 1 << 62):
            gg.save(changed, state, {**state.metadata, key: value})
            with pytest.raises(StateError, match=re.escape(str(changed))):
                fit(2, state=tmp_path / "t", resume=changed)
    gg.save(changed, state, state.metadata)
    fit(2, resume=changed)
