"""The source of a rewritten model: a GGUF file or a Hugging Face folder, as tensors of rows and records of metadata."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.gguf_io.read import GGUFFile, GGUFTensor
from pyggml.gguf_io.split import PartReader, open_model, refuse_own_output
from pyggml.hf.folder import HFFolder, is_folder, open_hf_folder
from pyggml.models import get_architecture
from pyggml.models.weights import CheckedWeights
from pyggml.tensor import Context

_SHOWN = 20  # faults of a folder that an error lists
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class SourceTensor(Protocol):
    """A tensor of a source: the type of its `rows`, its `ne` (four entries), the number of stored bytes."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def ne(self) -> tuple[int, int, int, int]: ...
    @property
    def nbytes(self) -> int: ...


class Source(Protocol):
    """A model to rewrite: an `HFFolder`, or a `GGUFSource` for a GGUF file (or all its parts)."""

    @property
    def path(self) -> str: ...
    @property
    def kv(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, SourceTensor]: ...
    @property
    def alignment(self) -> int: ...

    def records(self, without: Container[str]) -> list[bytes]:
        """The records of its metadata, except those of the keys `without`."""
        ...

    def rows(self, name: str, n_elements: int) -> Iterator[Bytes]:
        """The stored bytes of a tensor, uint8 [rows, bytes of a row], about `n_elements` at a time; each piece within
        one matrix."""
        ...

    def refuse_output(self, out: str) -> None:
        """Raise GGUFError when writing `out` would overwrite a file that is read."""
        ...


class GGUFSource:
    """A GGUF file as a source."""

    def __init__(self, file: GGUFFile) -> None:
        self._file, self.path, self.kv, self.alignment = file, file.path, file.kv, file.alignment
        self.tensors: Mapping[str, GGUFTensor] = file.tensors

    def records(self, without: Container[str]) -> list[bytes]:
        """As they are in the file."""
        return [bytes(self._file.data[a:b]) for key, (a, b) in self._file.kv_spans.items() if key not in without]

    def rows(self, name: str, n_elements: int) -> Iterator[Bytes]:
        """See `Source`. Raises GGUFError when the file has become shorter."""
        t = self.tensors[name]
        row_size, step = t.dtype.row_size(t.ne[0]), max(1, n_elements // t.ne[0])
        with PartReader(self._file) as reader:
            for matrix in range(t.ne[2] * t.ne[3]):
                first, end = matrix * t.ne[1], (matrix + 1) * t.ne[1]
                for i in range(first, end, step):
                    n_rows = min(step, end - i)
                    yield reader.read(t, i * row_size, n_rows * row_size).reshape(n_rows, row_size)

    def refuse_output(self, out: str) -> None:
        """See `Source`."""
        refuse_own_output(self._file, (out,))


def open_source(path: str | os.PathLike[str], vocab_only: bool = False) -> Source:
    """Open a GGUF file (the first, if it has several parts) or a Hugging Face folder. Raises GGUFError for a bad file;
    ModelError for a bad folder, also when its tensors are not those of its model."""
    if not is_folder(path):
        return GGUFSource(open_model(path))
    folder = open_hf_folder(path, vocab_only)
    if not vocab_only:
        _check_tensors(folder)
    return folder


def _check_tensors(folder: HFFolder) -> None:
    """Raises ModelError, naming the tensors that are missing or whose shapes are not those of the model."""
    architecture, ctx = get_architecture(folder.family.arch), Context()
    weights = CheckedWeights({name: ctx.new_tensor(t.dtype, t.ne, name) for name, t in folder.tensors.items()})
    architecture.declare(architecture.hparams(folder.family.arch, folder.kv), weights)
    faults = list(weights.faults.values())
    if faults:
        more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ModelError(f"{folder.path}: {'; '.join(faults[:_SHOWN])}{more}")
