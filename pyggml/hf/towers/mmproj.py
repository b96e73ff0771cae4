"""Write the tower of a folder as an mmproj file: the keys and tensors that llama.cpp reads, and pyggml's own beside
them. Source: llama.cpp's tools/mtmd/clip-impl.h and its converter."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from pyggml.codec import encode
from pyggml.dtypes import DType
from pyggml.errors import DTypeError, GGUFError, MediaError, ModelError
from pyggml.gguf_io.split import refuse_source
from pyggml.gguf_io.write import GGUFOut, TensorInfo, kv_record
from pyggml.media.processors import colours_of
from pyggml.tensor import Ne, Tensor, rank_of

from ..parts import read_object
from . import open_tower
from .family import PROCESSOR_KEY

TYPES = {DType.F32: 0, DType.F16: 1, DType.BF16: 32}  # -> general.file_type
_ALIGNMENT = 32
_OF_LLAMA_CPP = (  # projectors of llama.cpp
    *("mlp", "gemma3", "idefics3", "internvl", "pixtral", "glm4v", "llama4", "lfm2", "minicpmv4_6"),
    *("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "qwen2a", "voxtral", "ultravox"),
)
_SPLIT = ("qwen2vl_merger", "qwen2.5vl_merger")  # whose files have Q, K and V apart
_F32 = ("patch_embd", "position_embd", "patch_merger", "conv1d", "embd.img_break")  # roles that are F32
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def write_mmproj(
    folder: str | os.PathLike[str], path: str | os.PathLike[str], dtype: DType | None = None
) -> tuple[str, bool]:
    """Write the tower of a Hugging Face folder to the GGUF file `path`, which appears when it is complete. Returns the
    tower's name (`clip.projector_type`), and whether llama.cpp knows it; pyggml reads all of them with
    `load_model(..., mmproj=path)`.

    dtype   F32, F16 or BF16, of the matrices that products read; None: as the folder stores them. Vectors are F32, and
            so are kernels and positions

    Raises ModelError for a folder without a tower, for Whisper, whose encoder is no projector of a text model, and for
    towers that cannot be read; DTypeError for another type; GGUFError when the file cannot be written.
    """
    if dtype is not None and dtype not in TYPES:
        raise DTypeError(f"an mmproj file has tensors of {', '.join(t.name for t in TYPES)}, not {dtype.name}")
    refuse_source(folder, path)
    found = open_tower(os.fspath(folder))
    if found is None:
        raise ModelError(f"{os.fspath(folder)}: has no tower that sees or hears: there is nothing for an mmproj file")
    kv, tensors = found
    name: str = kv["clip.projector_type"]
    if name == "whisper":
        raise ModelError(f"{os.fspath(folder)}: Whisper's encoder is part of the model: it makes no mmproj file")
    parts = [part for n, t in tensors.items() for part in _parts(name, n, t, dtype)]
    most = max(TYPES, key=lambda d: sum(math.prod(ne) for _, of, ne, _, _ in parts if of is d))
    infos: list[TensorInfo] = [(n, of, ne[: rank_of(ne)]) for n, of, ne, _, _ in parts]
    records = [kv_record(key, _stored(value)) for key, value in _keys(Path(folder), kv, dtype or most).items()]
    try:
        with GGUFOut(path, records, infos, _ALIGNMENT) as out:
            for _, of, _, source, rows in parts:
                out.write_tensor(_values(source, of, rows))
    except OSError as e:
        raise GGUFError(f"{os.fspath(path)}: cannot be written: {e.strerror}") from e
    return name, name in _OF_LLAMA_CPP


def _parts(tower: str, name: str, t: Tensor, dtype: DType | None) -> Iterator[tuple[str, DType, Ne, Tensor, slice]]:
    """The tensors of the file that one of the tower becomes: name, type, ne, source, and which of its rows."""
    of = t.dtype if dtype is None or rank_of(t.ne) < 2 else dtype
    of = DType.F32 if any(role in name for role in _F32) else of
    if tower not in _SPLIT or ".attn_qkv." not in name:
        yield name, of, t.ne, t, slice(None)
        return
    is_matrix = name.endswith(".weight")
    n = t.ne[1 if is_matrix else 0] // 3
    for i, x in enumerate("qkv"):
        ne = (t.ne[0], n, 1, 1) if is_matrix else (n, 1, 1, 1)
        yield name.replace("attn_qkv", f"attn_{x}"), of, ne, t, slice(i * n, (i + 1) * n)


def _values(t: Tensor, dtype: DType, rows: slice) -> Iterator[np.ndarray[Any, np.dtype[Any]]]:
    values = t.numpy()[rows]
    yield encode(values, dtype)


def _stored(value: Any) -> Any:
    """Numbers with a fraction are F32 in these files."""
    return np.float32(value) if isinstance(value, float) else value


def _keys(folder: Path, kv: Mapping[str, Any], dtype: DType) -> dict[str, Any]:
    """The metadata of the file: that of the tower, and what llama.cpp says in other words."""
    config = read_object(folder / "config.json")
    said = config.get("_name_or_path")
    name = Path(said).name if isinstance(said, str) and said else folder.resolve().name
    keys: dict[str, Any] = {"general.architecture": "clip", "general.type": "mmproj", "general.name": name}
    keys |= {"general.file_type": TYPES[dtype], "general.quantization_version": 2, **kv}
    act = str(kv.get("clip.vision.hidden_activation", ""))
    if act == "silu":
        keys["clip.use_silu"] = True
    elif act.startswith("gelu"):
        keys["clip.use_gelu"] = True
    tower = kv["clip.projector_type"]
    if tower == "mlp":
        keys["clip.has_llava_projector"] = True
        if "clip.vision.feature_layer" not in kv:  # otherwise llama.cpp leaves the last layer out
            keys["clip.vision.feature_layer"] = np.array([kv["clip.vision.block_count"]], np.int32)
    if tower == "qwen2.5vl_merger":
        keys |= _window_pattern(kv)
    for file in _PROCESSORS:
        processor = read_object(folder / file)
        if processor:
            keys |= _of_processor(processor, tower)
            break
    return keys


def _window_pattern(kv: Mapping[str, Any]) -> dict[str, int]:
    """How often a layer sees the whole picture, when that is regular. Other towers llama.cpp cannot run."""
    full: list[int] = kv["clip.vision.full_attention_layers"].tolist()
    regular = bool(full) and full == [(full[0] + 1) * (i + 1) - 1 for i in range(len(full))]
    return {"clip.vision.n_wa_pattern": full[0] + 1} if regular else {}


def _of_processor(processor: dict[str, Any], tower: str) -> dict[str, Any]:
    """What the file says of the treatment of pictures and sounds."""
    nested: Any = processor.get("image_processor")
    own: dict[str, Any] = {**processor, **nested} if isinstance(nested, dict) else processor
    keys: dict[str, Any] = {PROCESSOR_KEY: json.dumps(processor)}
    try:
        colours = colours_of(processor)
    except MediaError:  # sounds, or a kind that nobody knows
        colours = {key: own.get(key) for key in ("image_mean", "image_std")}
    for key, values in colours.items():
        if isinstance(values, (list, tuple)):
            keys[f"clip.vision.{key}"] = np.array(values, np.float32)
    size: Any = own.get("size")
    longest = cast("Mapping[str, Any]", size).get("longest_edge") if isinstance(size, dict) else None
    if tower == "idefics3" and type(longest) is int:
        keys["clip.vision.preproc_image_size"] = longest
    if tower == "internvl" and own.get("crop_to_patches"):
        for key, name in (("min_patches", "min_tiles"), ("max_patches", "max_tiles")):
            if type(own.get(key)) is int:
                keys[f"clip.vision.preproc_{name}"] = own[key]
    return keys
