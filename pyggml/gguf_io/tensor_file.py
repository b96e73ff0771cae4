"""Save and load one's own named tensors, with metadata, in GGUF files, as np.savez does for arrays."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from pyggml.codec import Array
from pyggml.errors import GGMLError, GGUFError, path_name
from pyggml.scope import no_scope
from pyggml.tensor import Context, Tensor

from .read import ALIGNMENT_KEY, GGUF_DEFAULT_ALIGNMENT, MAX_NAME, KVValue, open_gguf
from .write import GGUFOut, kv_record


class TensorFile(dict[str, Tensor]):
    """The tensors of a file by name, in its order, each with memory of its own; `metadata` by key; `ctx` owns them."""

    def __init__(self, metadata: Mapping[str, KVValue]) -> None:
        super().__init__()
        self.metadata, self.ctx = dict(metadata), Context()

    def __repr__(self) -> str:
        return f"<TensorFile {', '.join(t.describe() for t in self.values())}; {len(self.metadata)} keys>"


def save(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor | Array], metadata: Mapping[str, Any] | None = None
) -> None:
    """Write tensors of any type (arrays as `Context.from_numpy` stores them) to a GGUF file, with their names, shapes
    and stored bytes, densely; Vars in shapes as they are bound now. The file appears when it is complete; until then
    there is what was there before.

    A name is 1 to 64 bytes of UTF-8. `metadata` are strings, bools, whole numbers (stored as UINT32, INT32, INT64 or
    UINT64, the first that fits), floats (FLOAT64), NumPy's numbers and one-dimensional arrays (as they are), and lists
    of strings or of numbers. Raises GGUFError for other names and values and when the file cannot be written,
    AllocError for a tensor that is not computed, DTypeError and ShapeError for arrays that no tensor stores.
    """
    if isinstance(path, Mapping):
        raise GGUFError("the path comes before the tensors: save(path, tensors)")
    out = path_name(path, GGUFError)
    if not isinstance(tensors, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GGUFError(f"save takes a mapping of names to tensors, not {type(tensors).__name__}")
    ctx = Context()
    named = {_name(n): _readable(ctx, n, t) for n, t in tensors.items()}
    if metadata is not None and not isinstance(metadata, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GGUFError(f"metadata must be a mapping, not {type(metadata).__name__}")
    kv = dict(metadata or {})
    alignment = kv.pop(ALIGNMENT_KEY, GGUF_DEFAULT_ALIGNMENT)
    records = [kv_record(key, value) for key, value in kv.items()]
    if alignment != GGUF_DEFAULT_ALIGNMENT:
        if not isinstance(alignment, int) or not 0 < alignment < 1 << 32 or alignment & (alignment - 1):
            raise GGUFError(f"{ALIGNMENT_KEY} must be a power of two, not {alignment!r:.40}")
        records.append(kv_record(ALIGNMENT_KEY, alignment))
    infos = [(n, t.dtype, t.layout[0][: t.rank or 1]) for n, t in named.items()]
    try:
        with GGUFOut(out, records, infos, alignment) as gguf:
            for t in named.values():
                gguf.write_tensor([np.frombuffer(t.tobytes(), np.uint8)])
    except OSError as e:
        raise GGUFError(f"{out}: cannot be written: {e.strerror}") from e


@no_scope()
def load(path: str | os.PathLike[str]) -> TensorFile:
    """The tensors of a GGUF file by name, as leafs of a context of their own with copies of the data (so the file can
    be replaced, and the tensors set), and its metadata: `load(path)["w"]`, `load(path).metadata`.

    Raises GGUFError when the file cannot be read, AllocError when there is no memory. `load_model` opens models.
    """
    file = open_gguf(path)
    found = TensorFile(file.kv)
    for name, t in file.tensors.items():
        found[name] = found.ctx.from_bytes(file.tensor_bytes(name), t.dtype, t.ne[: max(t.n_dims, 1)], name)
    return found


def _name(name: Any) -> str:
    try:
        if 0 < len(name.encode()) <= MAX_NAME:
            return name
    except (AttributeError, UnicodeError):
        pass
    raise GGUFError(f"a tensor's name must be 1 to {MAX_NAME} bytes of text, not {name!r:.80}")


def _readable(ctx: Context, name: str, value: Tensor | Array) -> Tensor:
    """The tensor of that name in the file. Its errors name it: there may be hundreds."""
    try:
        t = value if isinstance(value, Tensor) else ctx.from_numpy(value)
        t.check_readable()
    except GGMLError as e:
        raise type(e)(f"save: {name}: {e}") from e
    return t
