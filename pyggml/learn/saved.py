"""What a trainer writes: adapters, models, and its own state."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import numpy as np

from pyggml.backends.quantize import dequantize, quantize
from pyggml.dtypes import DType
from pyggml.errors import ModelError, StateError
from pyggml.gguf_io.write import kv_record
from pyggml.hf.export import export_folder
from pyggml.llm.adapters.lora import refuse_dora, save_lora
from pyggml.llm.adapters.peft import peft_files, save_lora_peft
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized
from pyggml.llm.quantize.source import Source, SourceTensor
from pyggml.models.names import tensor_name
from pyggml.small_file import parse_json
from pyggml.tensor import Tensor
from pyggml.types import Floats

from .checkpoint import NUMBERS
from .lora import LoRA, Matrices, peft_pairs
from .optimisers import Optimiser
from .state_file import STEPS, Trained, check_output, read_state, write_state

if TYPE_CHECKING:
    from pyggml.llm.adapters.lora import Lora
    from pyggml.llm.loaded import LoadedModel

_ARCHITECTURE = "general.architecture"
_OPTIONS = "pyggml.training.options"
_MODEL = "pyggml.training.model"
_HASHED = 4096  # bytes of each weight that tell a model from another one
_F16_INFINITE = 65520  # from here on, rounding to F16 gives an infinity


class Training(Protocol):
    """What is written of a `Trainer`, see there."""

    model: LoadedModel
    opt: Optimiser
    clip: float | None
    dropout: float
    seed: int
    train: Literal["all"] | LoRA
    params: dict[str, Tensor]
    states: dict[str, tuple[Tensor, ...]]
    matrices: dict[str, Matrices]
    n_steps: int

    @property
    def trained(self) -> Sequence[str]: ...
    @property
    def lora(self) -> Lora: ...
    def weight(self, name: str) -> Floats: ...


def output_of(path: str | os.PathLike[str], *read: str | os.PathLike[str] | None) -> str:
    """The name of a GGUF file or new folder that `save` is to write. Raises ModelError as `check_output`, and when
    there is something that is no GGUF file."""
    out = check_output(path, *read)
    if not out.endswith(".gguf") and os.path.exists(out):
        raise ModelError(f"{out}: is there already; name another folder")
    return out


def check_save(t: Training, path: str | os.PathLike[str]) -> None:
    """Raise ModelError, before a training, for an adapter that `save` cannot write as `path`."""
    if isinstance(t.train, LoRA):
        if os.fspath(path).endswith(".gguf"):
            refuse_dora(t.lora, path)
        else:
            _ = peft_files(peft_pairs(t.train, t.matrices), t.model)


def save(t: Training, path: str | os.PathLike[str]) -> None:
    """See `Trainer.save`."""
    out = output_of(path, t.model.path)
    if isinstance(t.train, LoRA):
        for param, tensor in t.params.items():
            _refuse_failed(param, tensor.numpy())
        try:
            if out.endswith(".gguf"):
                save_lora(t.lora, out)
            else:
                save_lora_peft(peft_pairs(t.train, t.matrices), Path(out), t.model)
        except OSError as e:
            raise ModelError(f"{out}: cannot be written: {e.strerror}") from None
        return
    if out.endswith(".gguf"):
        _write(t, out)
        return
    temporary = f"{out}.{secrets.token_hex(4)}.gguf"
    try:
        _write(t, temporary)
        export_folder(temporary, out)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def _refuse_failed(name: str, values: Floats) -> None:
    if not np.isfinite(values).all():
        raise ModelError(f"{name} has elements that are not finite numbers: the training has failed")


def _write(t: Training, path: str) -> None:
    plan = plan_quantization(t.model.path, None)
    write_quantized(replace(plan, source=_TrainedSource(plan.source, t)), path)


class _Either(NamedTuple):
    """What one of two containers has."""

    a: Container[str]
    b: Container[str]

    def __contains__(self, x: object) -> bool:
        return isinstance(x, str) and (x in self.a or x in self.b)


class _TrainedSource:
    """A model's source, with the weights as they were trained."""

    def __init__(self, source: Source, t: Training) -> None:
        self._source, self._t, self._trained = source, t, set(t.trained)
        self.path, self.kv, self.alignment = source.path, source.kv, source.alignment
        self.tensors: Mapping[str, SourceTensor] = source.tensors

    def records(self, without: Container[str]) -> list[bytes]:
        """See `Source`. Trained numbers have their new values, rounded to the type of the embeddings: a folder has all
        in one type."""
        keys = [key for key in NUMBERS if key in self.kv and key not in without]
        dtype, n_layer = self.tensors["token_embd.weight"].dtype, self._t.model.hparams.n_layer
        kept = self._source.records(_Either(keys, without))
        for key in keys:
            values = np.concatenate([self._t.params[tensor_name(key, il, "")].numpy() for il in range(n_layer)])
            kept.append(kv_record(key, dequantize(quantize(values, dtype), dtype)))
        return kept

    def rows(self, name: str, n_elements: int) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
        """See `Source`. Raises ModelError for a weight that is not a finite number."""
        if name not in self._trained:
            yield from self._source.rows(name, n_elements)
            return
        values = self._t.weight(name)
        _refuse_failed(name, values)
        of = self.tensors[name]
        if of.dtype is DType.F16 and np.abs(values).max() >= _F16_INFINITE:
            raise ModelError(f"{name} has elements that F16 does not have: load the model in F32 or BF16 to train it")
        rows = values.reshape(-1, of.ne[0])
        step, per_matrix = max(1, n_elements // of.ne[0]), of.ne[1]
        for first in range(0, len(rows), per_matrix):
            for i in range(first, first + per_matrix, step):
                piece = quantize(rows[i : min(i + step, first + per_matrix)], of.dtype)
                yield piece.reshape(-1, of.dtype.row_size(of.ne[0]))

    def refuse_output(self, out: str) -> None:
        """See `Source`."""
        self._source.refuse_output(out)


def save_state(t: Training, path: str | os.PathLike[str], more: Mapping[str, Any]) -> None:
    """See `Trainer.save_state`. `more`: metadata."""
    options = json.dumps(_options(t, t.n_steps))
    write_state(check_output(path, t.model.path), _of(t), t.n_steps, {_OPTIONS: options, **more})


def load_state(t: Training, path: str | os.PathLike[str], check: Callable[[Mapping[str, Any]], None]) -> None:
    """See `Trainer.load_state`. `check`: see `read_state`."""

    def check_all(metadata: Mapping[str, Any]) -> None:
        check(metadata)
        _check_options(os.fspath(path), metadata.get(_OPTIONS), _options(t, metadata[STEPS]))

    t.n_steps = read_state(path, _of(t), check_all)


def _of(t: Training) -> Trained:
    return Trained(t.params, t.states, {_ARCHITECTURE: t.model.arch, _MODEL: _digest_of(t.model)})


def _digest_of(model: LoadedModel) -> str:
    """What tells a model from other ones: the names of its weights, and the first bytes of each."""
    found = hashlib.blake2b(digest_size=16)
    for name, w in model.weights.items():
        found.update(name.encode() + w.raw()[:_HASHED].tobytes())
    return found.hexdigest()


def _options(t: Training, step: int) -> dict[str, str]:
    """What the steps of a training follow, by name, as text. Of a learning rate that is a function: that of `step`, the
    next one."""
    found = {"optimiser": type(t.opt).__name__}
    for f in fields(t.opt) if is_dataclass(t.opt) else ():
        value = getattr(t.opt, f.name)
        found[f.name] = _text(value(step) if callable(value) else value)
    found |= {"clip": _text(t.clip), "dropout": _text(t.dropout)}
    if t.dropout:
        found["seed of the dropout"] = str(t.seed)
    if isinstance(t.train, LoRA):
        found["LoRA factor"] = _text(t.train.factor)
    return found


def _text(value: object) -> str:
    """A number with six digits: the last ones of a cosine may differ from machine to machine."""
    if isinstance(value, tuple):
        return ", ".join(map(_text, cast("tuple[object, ...]", value)))
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)


def _check_options(path: str, stored: object, here: dict[str, str]) -> None:
    """Raises StateError, which says what differs."""
    there = parse_json(f"{path}: {_OPTIONS}", stored, StateError) if isinstance(stored, str) else None
    if not isinstance(there, dict):
        raise StateError(f"{path}: {_OPTIONS} is {stored!r:.60}")
    there = cast("dict[str, object]", there)
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    if names:
        had, has = (", ".join(f"{name} {x[name]}" for name in names if name in x) for x in (there, here))
        raise StateError(
            f"{path}: is the state of a training with {had or 'fewer options'}; here: {has or 'none of them'}"
        )
