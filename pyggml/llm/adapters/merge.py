"""Write a model with an adapter merged into its weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pyggml.backends.quantize import dequantize, quantize
from pyggml.dtypes import DType
from pyggml.errors import GGUFError
from pyggml.gguf_io.read import GGUFFile, GGUFTensor
from pyggml.gguf_io.split import SPLIT_KEYS, PartReader, metadata_records, refuse_own_output
from pyggml.gguf_io.write import GGUFOut, kv_record
from pyggml.tensor import Tensor, rank_of
from pyggml.types import Floats

from .active import checked
from .lora import OUTPUT, TOKEN_EMBD, Lora, Pair

Progress = Callable[[int, int], None]  # bytes read, bytes in all

_CHUNK = 1 << 22  # elements that are in memory as F32 at a time
_FILE_TYPE_KEY, _MOSTLY_F16 = "general.file_type", np.uint32(1)
_F16_MAX = 65504.0


class _Out(NamedTuple):
    """A tensor of the new file: its source, and `factor` times the pair of an adapter, if the adapter changes it."""

    name: str
    source: GGUFTensor
    dtype: DType
    pair: Pair | None
    factor: float = 0.0


def merge_lora(
    file: GGUFFile, lora: Lora, scale: float, out: str | os.PathLike[str], progress: Progress | None = None
) -> None:
    """Write the model in `file` with `scale` times the adapter added to its weights: W + scale * factor * B A.

    Weights keep their types, except quantised ones that change: these become F16, as with llama.cpp (`quantize` makes
    them small again). A model whose embeddings are its output too gets an output of its own when the adapter changes
    one of the two. The model is read once, some rows at a time; the file appears when it is complete. `lora` must have
    been checked against the model. Raises GGUFError when the output is the input or cannot be written, or when a weight
    becomes too large for its type; ModelError for a scale that is not a finite number (up to MAX_SCALE).
    """
    ((_, scale),) = checked([(lora, scale)])
    path = os.fspath(out)
    refuse_own_output(file, (path,))
    tensors = list(_plan(file, lora, scale))
    kv = metadata_records(file)
    if any(t.dtype is not t.source.dtype for t in tensors):
        spans = {key: span for key, span in file.kv_spans.items() if key not in (*SPLIT_KEYS, _FILE_TYPE_KEY)}
        kv = [bytes(file.data[a:b]) for a, b in spans.values()] + [kv_record(_FILE_TYPE_KEY, _MOSTLY_F16)]
    infos = [(t.name, t.dtype, t.source.ne[: rank_of(t.source.ne)]) for t in tensors]
    total, done = sum(t.source.nbytes for t in tensors), 0
    try:
        with PartReader(file) as reader, GGUFOut(path, kv, infos, file.alignment) as gguf:
            for t in tensors:
                gguf.write_tensor(reader.chunks(t.source) if t.pair is None else _merged(reader, t, t.pair))
                done += t.source.nbytes
                if progress is not None:
                    progress(done, total)
    except OSError as e:
        raise GGUFError(f"{path}: cannot be written: {e.strerror}") from e


def _plan(file: GGUFFile, lora: Lora, scale: float) -> Iterator[_Out]:
    sources = list(file.tensors.values())
    if OUTPUT not in file.tensors and {TOKEN_EMBD, OUTPUT} & set(lora.pairs):
        sources.append(replace(file.tensors[TOKEN_EMBD], name=OUTPUT))
    for t in sources:
        pair = lora.pairs.get(t.name)
        if pair is None:
            yield _Out(t.name, t, t.dtype, None)
            continue
        yield _Out(t.name, t, DType.F16 if t.dtype.is_quantized else t.dtype, pair, scale * pair.factor)


def _floats(t: Tensor) -> Floats:
    """[matrices, rows, columns]"""
    return dequantize(t.tobytes(), t.dtype, t.ne[2::-1])


def _merged(reader: PartReader, t: _Out, pair: Pair) -> Iterator[npt.NDArray[Any]]:
    with np.errstate(over="ignore"):  # infinities are refused below
        a, b = _floats(pair.a), _floats(pair.b) * np.float32(t.factor)
    lefts, rights = b, a  # [matrices, rows, rank], [matrices, rank, columns]
    if t.name == TOKEN_EMBD:
        lefts, rights = a, np.swapaxes(b, 1, 2)
    n, m, n_matrices, _ = t.source.ne
    magnitudes = None if pair.magnitude is None else _floats(pair.magnitude).reshape(n_matrices, m)
    row, step = t.source.dtype.row_size(n), max(1, _CHUNK // n)
    for i in range(n_matrices):
        left, right = lefts[i], rights[i]
        for first in range(0, m, step):
            rows = left[first : first + step]
            stored = reader.read(t.source, (i * m + first) * row, len(rows) * row).reshape(len(rows), row)
            with np.errstate(over="ignore", invalid="ignore"):
                x = dequantize(stored, t.source.dtype) + rows @ right
                if magnitudes is not None:
                    x *= (magnitudes[i, first : first + step] / np.linalg.norm(x, axis=1))[:, None]
            largest = float(np.max(np.abs(x)))
            if not largest <= (_F16_MAX if t.dtype is DType.F16 else np.finfo(np.float32).max):
                raise GGUFError(
                    f"tensor {t.name}: a weight becomes {largest:g}, too large for {t.dtype.name}: "
                    f"the adapter counts {t.factor:g} times"
                )
            yield quantize(x, t.dtype)
