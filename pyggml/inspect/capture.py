"""Captures: the values of a few nodes for a long text, on disk, for example to train a probe on them."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyggml.codec import Array
from pyggml.errors import GraphError, ModelError, whole
from pyggml.gguf_io.atomic_file import AtomicFile
from pyggml.llm.batch import token_ids
from pyggml.llm.model import Model
from pyggml.llm.options import ContextOptions
from pyggml.signature import hands_on, keywords_of
from pyggml.small_file import read_json

from .trace import no_such_node, one_ubatch, with_all_logits

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MANIFEST = "manifest.json"


@hands_on(*keywords_of(Model.new_context))
def capture(
    model: Model,
    ids: Sequence[int],
    folder: str | os.PathLike[str],
    *patterns: str,
    n_ctx: int = 512,
    dtype: npt.DTypeLike = np.float32,
    progress: Callable[[int, int], object] | None = None,
    **options: Unpack[ContextOptions],
) -> dict[str, Path]:
    """Evaluate tokens and store the nodes that match, one row for each token: `folder/NAME.npy` of shape
    (len(ids), row) and type `dtype`, and `manifest.json`. Tokens are evaluated in windows of `n_ctx`; each
    window begins at position 0 with an empty context.

    Called again with the same arguments, a capture that was broken off goes on where it stopped. The files can be
    opened while it runs (`np.load(path, mmap_mode="r")`). `progress(done, total)` counts tokens. Returns name -> file.
    Raises GraphError when no node matches, or one does not have a row for each token; ModelError for a `dtype` other
    than float16 to float64, and when `folder` holds another capture or files of one are missing; and what decoding
    raises.
    """
    n_ctx = whole("n_ctx", n_ctx, 1, error=ModelError)
    sizes = one_ubatch(n_ctx, options)
    tokens = token_ids(ids).astype(np.int64)
    kind, root = _float_type(dtype), Path(folder)
    about: dict[str, Any] = {"model": model.path, "arch": model.arch, "patterns": patterns, "n_ctx": n_ctx}
    about |= {"n_tokens": len(tokens), "crc32": zlib.crc32(tokens.astype("<i8").tobytes()), "dtype": kind.str}
    about |= {"options": {k: str(getattr(v, "name", v)) for k, v in options.items()}}
    done, names = _done(root, json.loads(json.dumps(about)))
    files: dict[str, Array] = {}
    begin = done

    def keep(name: str, x: Array) -> None:
        rows = x.reshape(len(x), -1) if x.ndim > 1 else x[None]
        if len(rows) != size:
            raise GraphError(f"{name} has shape {x.shape}: no row for each of the {size} tokens of the batch")
        if name not in files:
            if done and name not in names:
                raise ModelError(f"{root} has no {name} of the {done} tokens that are done")
            files[name] = _rows(root / f"{name}.npy", (len(tokens), rows.shape[1]), kind, done)
        files[name][begin : begin + size] = rows

    with model.new_context(n_ctx, **{**options, **sizes}) as ctx, model.tap(*patterns, callback=keep):
        for begin in range(done, len(tokens), n_ctx):
            part = tokens[begin : begin + n_ctx]
            size = len(part)
            ctx.memory.clear()
            ctx.decode(with_all_logits(part.tolist()))
            if not files:
                raise no_such_node(model, patterns)
            for rows in files.values():
                rows.flush()  # pyright: ignore[reportAttributeAccessIssue]
            _note(root, about | {"done": begin + size, "nodes": list(files)})
            if progress is not None:
                progress(begin + size, len(tokens))
    return {name: root / f"{name}.npy" for name in files or names}


def _float_type(dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind.kind != "f" or kind.itemsize > 8:
        raise ModelError(f"dtype must be float16, float32 or float64, not {dtype!r:.40}")
    return kind


def _done(root: Path, about: dict[str, Any]) -> tuple[int, list[str]]:
    """How many tokens of this capture the folder `root` has, and the names of its nodes."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / _MANIFEST
    if not path.exists():
        return 0, []
    try:
        there = dict(read_json(path, ModelError))
        done, names = int(there.pop("done")), [str(name) for name in there.pop("nodes")]
    except (ValueError, TypeError, KeyError) as e:
        raise ModelError(f"{path} is not that of a capture: {type(e).__name__} {e}") from None
    other = [k for k in about if there.get(k) != about[k]]
    if other:
        raise ModelError(f"{root} holds another capture: {', '.join(other)} differ ({there.get(other[0])!r:.60} there)")
    missing = [name for name in names if not (root / f"{name}.npy").exists()]
    if missing:
        raise ModelError(f"{root} holds only a part of this capture: {missing[0]}.npy is missing")
    return done, names


def _rows(path: Path, shape: tuple[int, int], kind: np.dtype[Any], done: int) -> Array:
    if done:
        rows = np.lib.format.open_memmap(path, "r+")
        if rows.shape == shape and rows.dtype == kind:
            return rows
        raise ModelError(f"{path} is {rows.dtype} {rows.shape}, not {kind} {shape} as its manifest says")
    return np.lib.format.open_memmap(path, "w+", kind, shape)


def _note(root: Path, about: dict[str, Any]) -> None:
    with AtomicFile(root / _MANIFEST) as out:
        out.file.write(json.dumps(about).encode())
