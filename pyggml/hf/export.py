"""The way back: a GGUF file as a Hugging Face folder, with every move undone.

The new folder is read again before it appears under its name. When its metadata or its tensors differ from the file's,
the export fails, and the error names what would be lost.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from pyggml.backends.quantize import dequantize
from pyggml.codec import bf16_to_f32, f32_to_bf16
from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.gguf_io.atomic_file import saying_where
from pyggml.gguf_io.read import GGUFFile, GGUFTensor
from pyggml.gguf_io.split import PartReader, open_model
from pyggml.models import get_architecture
from pyggml.system.files import sync_folder, sync_tree

from .export_tokenizer import tokenizer_files
from .families import families_of_arch
from .families.encoders import pooling_files
from .families.spelling import INSIDE, OUTSIDE
from .family import Array, Family, Of
from .folder import HFFolder, open_hf_folder, sizes_of
from .metadata import COMMON, of_model, said_activation
from .moves import Merged, Sizes, Value
from .safetensors import SINGLE, header_of

Progress = Callable[[int, int], None]
_DTYPES = {DType.F32: ("F32", 4), DType.F16: ("F16", 2), DType.BF16: ("BF16", 2)}
_MADE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # computed from the config
_STILL = 1e29  # a dimension with a frequency factor this large does not turn
# What Python and NumPy raise for damaged files. Files can be damaged in too many ways to check for each of them.
_DAMAGED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
_OWN = ("general.", "tokenizer.", "split.")


def export_folder(
    source: str | os.PathLike[str], out: str | os.PathLike[str], progress: Progress | None = None
) -> None:
    """Write the GGUF file `source` as the folder `out`. The folder appears when it is complete; it must not exist yet.
    All weights get one type: the type of the embeddings, or BF16 when the embeddings are quantised.

    Raises GGUFError for a bad file; ModelError for an architecture that cannot be written as a folder, and for a file
    that would become another model, naming the key or the tensor that would be lost.
    """
    file = open_model(source)
    arch = file.kv.get("general.architecture")
    target = Path(os.fspath(out))
    if target.exists():
        raise ModelError(f"{target}: is there already; name another folder")
    reasons: list[str] = []
    for family in families_of_arch(str(arch)):
        temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
        try:
            temporary.mkdir(parents=True)
            with saying_where(target), np.errstate(over="raise", invalid="raise"):
                _write(file, family, temporary, progress)
            _compare(file, open_hf_folder(temporary), family)
            sync_tree(temporary)
            os.rename(temporary, target)
            sync_folder(target.parent)
            return
        except ModelError as e:
            if isinstance(e.__context__, (OSError, MemoryError)):  # the machine fails: that says nothing of the family
                raise
            reasons.append(f"as {family.types[0]}: {str(e).replace(str(temporary), str(target))}")
        except _DAMAGED as e:
            reasons.append(f"as {family.types[0]}: the file holds what its model cannot have ({type(e).__name__}: {e})")
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    raise ModelError(f"{file.path}: no way back. {'; '.join(reasons)}")


def _compare(file: GGUFFile, folder: HFFolder, family: Family) -> None:
    """Raise ModelError when the folder is not the same model as the file."""
    was, found = (of.kv.get("tokenizer.ggml.model", "none") for of in (file, folder))
    if found != was and was != "no_vocab":
        raise ModelError(f"the tokenizer would be of the kind {found!r} instead of {was!r}")
    for key, value in file.kv.items():
        if key.endswith(".nextn_predict_layers") and not value:
            continue  # the key has the value that its absence means
        if not key.startswith(_OWN) and not _same(folder.kv.get(key), value):
            raise ModelError(f"{key} would be {folder.kv.get(key)!r:.60} instead of {value!r:.60}")
    read = get_architecture(family.arch).hparams
    same_hparams = read(family.arch, file.kv) == read(family.arch, folder.kv)
    for key, value in folder.kv.items():
        if key.endswith(".vocab_size") and value == folder.tensors["token_embd.weight"].ne[1]:
            continue  # the tensor says the same
        if key.startswith(f"{family.arch}.") and same_hparams:
            continue  # the default
        if not key.startswith(_OWN) and key not in file.kv:
            raise ModelError(f"{key} would be {value!r:.60}, which the file does not say")
    for name in sorted(set(file.tensors) ^ set(folder.tensors)):
        raise ModelError(f"the tensor {name} would be {'lost' if name in file.tensors else 'new'}")
    for t in file.tensors.values():
        if folder.tensors[t.name].ne != t.ne:
            raise ModelError(f"the tensor {t.name} would have ne {list(folder.tensors[t.name].ne)}")


def _same(a: Any, b: Any) -> bool:
    """Whether two values are the same. Arrays of floats may differ in their last bits, because the config holds the
    numbers that they are computed from."""
    x, y = np.asarray(a), np.asarray(b)
    if x.shape == y.shape and x.dtype == y.dtype == np.float32 and x.ndim:
        return np.allclose(x, y, rtol=2.0**-20, atol=0)
    return np.array_equal(x, y)


# -- config ------------------------------------------------------------------------------------------------------------


def _keys_of(file: GGUFFile, family: Family) -> dict[str, Any]:
    """The keys of the architecture, without its name."""
    prefix = f"{family.arch}."
    return {key.removeprefix(prefix): value for key, value in file.kv.items() if key.startswith(prefix)}


def config_of(file: GGUFFile, family: Family) -> dict[str, Any]:
    """The contents of config.json, from a file's metadata."""
    keys = _keys_of(file, family)
    config: dict[str, Any] = {"architectures": [family.cls], "model_type": family.types[0]}
    config |= {"tie_word_embeddings": "output.weight" not in file.tensors, "dtype": _DTYPE_NAMES[_main_type(file)]}
    config |= said_activation(family.act) if family.act else {}
    for key, spec in {**COMMON, **family.keys}.items():
        if key not in keys:
            continue
        value = _plain(keys[key])
        if isinstance(spec, Of):
            config |= {} if spec.back is None else spec.back(value, keys)
        elif isinstance(spec, str | tuple):
            _set(config, spec if isinstance(spec, str) else spec[0], value)
    config["rope_parameters"] = {**config.get("rope_parameters", {}), **_rope(file, keys)}
    # The default padding token of some classes lies outside a small vocabulary.
    config = {"pad_token_id": None, **family.constants, **config}
    biases = {t.partition(".")[2].partition(".")[2] for t in file.tensors if t.endswith(".bias")}
    config["attention_bias"] = not biases.isdisjoint(("attn_q.bias", "attn_qkv.bias"))
    config["mlp_bias"] = "ffn_up.bias" in biases
    config |= family.by_tensors({t.name: t.ne for t in file.tensors.values()})
    windows = _windows(keys)
    if "local_attention" in config:  # modern-bert's name of the whole window; its `sliding_window` would be half of it
        del windows["sliding_window"]
    config |= windows
    n_nextn = keys.get("nextn_predict_layers", 0)
    config |= {family.nextn.says: n_nextn} if family.nextn is not None and n_nextn else {}
    n_vocab = file.tensors["token_embd.weight"].ne[1]
    config.setdefault("vocab_size", n_vocab)
    for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        found = file.kv.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(found, int) and found < n_vocab:  # files write 2**32 - 1 for "none"
            config[f"{role}_token_id"] = found
    return config


_DTYPE_NAMES = {DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16"}


def _set(config: dict[str, Any], name: str, value: object) -> None:
    *path, last = name.split(".")
    for part in path:
        config = config.setdefault(part, {})
    config.setdefault(last, value)


def _plain(value: Any) -> Any:
    """A value for JSON. A float gets the fewest digits that give the same F32."""
    if isinstance(value, np.ndarray):
        return [_plain(v) for v in value.tolist()]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope(file: GGUFFile, keys: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if "rope.freq_base" in keys:
        rope["rope_theta"] = _plain(keys["rope.freq_base"])
    n_head = keys.get("attention.head_count", 1)
    n_head = (n_head or 1) if isinstance(n_head, int) else 1
    head = keys.get("attention.key_length") or keys["embedding_length"] // n_head
    n_rot = keys.get("rope.dimension_count", head)
    if "attention.key_length_mla" not in keys:  # written even when it is 1, because classes have other defaults
        rope["partial_rotary_factor"] = n_rot / head
    kind = keys.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": _plain(keys["rope.scaling.factor"])}
        for name, key in (
            ("original_max_position_embeddings", "original_context_length"),
            ("extrapolation_factor", "yarn_ext_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            if f"rope.scaling.{key}" in keys:
                rope[name] = _plain(keys[f"rope.scaling.{key}"])
        if not keys.get("rope.scaling.yarn_truncate", True):
            rope["truncate"] = False
    if "rope.scaling.yarn_attn_factor" in keys:
        log_factor = math.log(keys["rope.scaling.factor"])
        rope["attention_factor"] = keys["rope.scaling.yarn_attn_factor"] * (1.0 + 0.1 * log_factor)
    if "rope.scaling.yarn_log_multiplier" in keys:
        rope["mscale"] = rope["mscale_all_dim"] = _plain(10 * keys["rope.scaling.yarn_log_multiplier"])
    if "rope_freqs.weight" in file.tensors:
        factors = file.tensor_bytes("rope_freqs.weight").view(np.float32)
        rope |= _proportional(factors) or _llama3(factors, rope["rope_theta"])
    if "rope.freq_base_swa" in keys:
        local = {"rope_type": "default", "rope_theta": _plain(keys["rope.freq_base_swa"])}
        return {"full_attention": rope, "sliding_attention": local}
    return rope


def _proportional(factors: Array) -> dict[str, Any]:
    """A config's entries for frequency factors that are 1 first and then keep the rest of a head from turning; empty
    for other factors."""
    turning = factors[factors < _STILL]
    if len(turning) == len(factors) and turning.max() > 1:
        return {}
    factor = {"factor": float(turning[0])} if len(turning) and turning[0] != 1 else {}
    return {"rope_type": "proportional", "partial_rotary_factor": len(turning) / len(factors), **factor}


def _llama3(factors: Array, theta: float) -> dict[str, Any]:
    """The parameters that Llama 3's frequency factors were computed from. All such models have low_freq_factor 1 and
    high_freq_factor 4."""
    factor = float(factors.max())
    n = 2 * len(factors)
    wavelength = 2 * math.pi * theta ** (np.arange(0, n, 2) / n)
    between = (factors > 1.0) & (factors < factor)
    smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    original = np.round(wavelength[between] * (1 + 3 * smooth))
    found = int(original[0]) if original.size else 8192
    numbers = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": found}
    return {"rope_type": "llama3", "factor": factor, **numbers}


def _windows(keys: Mapping[str, Any]) -> dict[str, Any]:
    if "attention.sliding_window" not in keys:
        return {"sliding_window": None, "use_sliding_window": False}
    found: dict[str, Any] = {"sliding_window": keys["attention.sliding_window"], "use_sliding_window": True}
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        kinds = of_model(pattern.tolist(), keys)
        found["layer_types"] = ["sliding_attention" if p else "full_attention" for p in kinds]
    return found


# -- tensors -----------------------------------------------------------------------------------------------------------


class Named(Protocol):
    """What has tensors by their GGUF names."""

    @property
    def tensors(self) -> Mapping[str, GGUFTensor]: ...


@dataclass(frozen=True)
class Written:
    """A tensor of the checkpoint, made from the GGUF tensors `sources`: of one `expert` of each, or of all (-1)."""

    name: str
    sources: tuple[GGUFTensor, ...]
    merged: Merged | None = None
    expert: int = -1


def _main_type(file: GGUFFile) -> DType:
    dtype = file.tensors["token_embd.weight"].dtype if "token_embd.weight" in file.tensors else DType.BF16
    return dtype if dtype in _DTYPES else DType.BF16


def planned(file: Named, family: Family, sizes: Sizes) -> Iterator[Written]:
    """The tensors of a checkpoint, with the names that the family gives them. Raises ModelError for a tensor whose name
    is not known, and for one that is part of a larger one whose other parts are missing."""
    taken: set[str] = set()
    n_nextn = sizes.ints("nextn_predict_layers")
    n_layer = sizes.ints("block_count") - n_nextn
    for t in file.tensors.values():
        if t.name in taken or t.name in _MADE:
            continue
        found = re.match(r"(?:(enc\.|dec\.|a\.)?blk\.(\d+)\.)?(.*?)(\.weight|\.bias)?$", t.name)
        assert found is not None
        side, layer, suffix = found[1] or "", found[2], found[4] or ""
        role = side + found[3]
        own = role + (".bias" if suffix == ".bias" else "")
        begin, head = f"{family.sides.get(side, family.layers)}.{layer}", int(layer or 0) - n_layer
        if family.nextn is not None and head >= 0:
            begin = family.nextn.layer(head, n_layer, family.layers)
            name = family.nextn.named(role, begin)
            if name is not None:
                if n_nextn > 1 and "{layer}" not in family.nextn.own[role]:
                    raise ModelError(
                        f"{name} is one for all drafting layers, of which the file has {n_nextn} with {role} each"
                    )
                yield Written(name + suffix, (t,))
                continue
        end, merged = next(((e, s) for e, s in family.merged.items() if own in s.roles), ("", None))
        if merged is not None:
            names = [f"blk.{layer}.{r}" + ("" if r.endswith(".bias") else ".weight") for r in merged.roles]
            lacking = next((n for n in names if n not in file.tensors), None)
            if lacking is not None:
                raise ModelError(f"the model has no tensor {lacking}")
            taken.update(names)
            yield Written(f"{begin}.{end}", tuple(file.tensors[n] for n in names), merged)
            continue
        table = INSIDE if layer else OUTSIDE
        beside = [k for k in family.spelled if k.startswith(f"{own}|")]
        for_layer = next((k for k in beside if f"blk.{layer}.{k.partition('|')[2]}.weight" in file.tensors), own)
        spelled = family.spelled.get(for_layer) or family.spelled.get(role) or table.get(own) or table.get(role)
        if spelled is None:
            raise ModelError(f"how {family.types[0]} spells the tensor {t.name} is not known")
        name = spelled.removesuffix("=") if spelled.endswith("=") else spelled + suffix
        name = f"{begin}.{name}" if layer else name
        if "{}" not in name:
            yield Written(name, (t,))
        else:
            yield from (Written(name.format(i), (t,), expert=i) for i in range(t.ne[t.n_dims - 1]))


def _undone(w: Written, family: Family, sizes: Sizes, arrays: list[Array], values: bool = True) -> Array:
    """The checkpoint's array for the GGUF's arrays. Without `values` only the shape of the result counts. Raises
    ModelError for shapes or values that the model cannot have."""
    parts: list[Array] = []
    try:
        with np.errstate(over="raise", invalid="raise", divide="ignore"):
            for t, a in zip(w.sources, arrays, strict=True):
                for step in reversed(family.moves_of(t.name)):
                    if not isinstance(step, Value):
                        a = step.back(a, sizes)
                    elif values:
                        a = step.back(a)
                parts.append(a)
            return parts[0] if w.merged is None else w.merged.back(parts, sizes)
    except (ValueError, IndexError, ArithmeticError) as e:
        found = ", ".join(f"{t.name} of ne {list(t.ne)}" for t in w.sources)
        raise ModelError(f"{found} cannot become {w.name}: {e}") from None


def _shape(w: Written, family: Family, sizes: Sizes) -> tuple[int, ...]:
    arrays: list[Array] = []
    for t in w.sources:
        shape = t.ne[: max(t.n_dims, 1)][::-1]
        arrays.append(np.empty(shape[1:] if w.expert >= 0 else shape, np.float32))
    return _undone(w, family, sizes, arrays, values=False).shape


def _read(reader: PartReader, t: GGUFTensor, expert: int) -> Array:
    shape = t.ne[: max(t.n_dims, 1)][::-1]
    n = t.nbytes // (t.ne[t.n_dims - 1] if expert >= 0 else 1)
    data = reader.read(t, max(expert, 0) * n, n)
    shape = shape[1:] if expert >= 0 else shape
    if t.dtype is DType.BF16:
        return bf16_to_f32(data.view(np.uint16)).reshape(shape)
    return dequantize(data.reshape(-1, t.dtype.row_size(t.ne[0])), t.dtype).reshape(shape)


def _write(file: GGUFFile, family: Family, folder: Path, progress: Progress | None) -> None:
    """Write the files of a folder."""
    sizes, dtype = sizes_of(family.arch, file.kv), _main_type(file)
    name, size = _DTYPES[dtype]
    tensors = [(w, _shape(w, family, sizes)) for w in planned(file, family, sizes)]
    tensors += _numbers(file, family)
    total = sum(math.prod(shape) for _, shape in tensors)
    done = 0
    with open(folder / SINGLE, "wb") as f, PartReader(file) as reader:
        f.write(header_of((w.name, name, shape) for w, shape in tensors))
        for w, shape in tensors:
            if w.sources:
                a = _undone(w, family, sizes, [_read(reader, t, w.expert) for t in w.sources])
            else:
                a = _number(file, family, w.name)
            a = np.ascontiguousarray(a, np.float32)
            f.write((f32_to_bf16(a) if dtype is DType.BF16 else a.astype(np.float16) if size == 2 else a).tobytes())
            done += math.prod(shape)
            if progress is not None:
                progress(done, total)
    files = {"config.json": config_of(file, family), **tokenizer_files(file.kv, folder)}
    files |= pooling_files(file.kv.get(f"{family.arch}.pooling_type"))
    files |= family.files(_keys_of(file, family))
    for path, content in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        text = json.dumps(content, indent=2, ensure_ascii=False)
        try:
            (folder / path).write_text(text, encoding="utf-8")
        except UnicodeEncodeError as e:
            raise ModelError(
                f"{path} would hold text that is no UTF-8: {text[max(e.start - 30, 0) : e.end]!r}"
            ) from None


def _numbers(file: GGUFFile, family: Family) -> Iterator[tuple[Written, tuple[int, ...]]]:
    """The checkpoint's tensors of one number each, which a GGUF has as keys."""
    for end, (key, shape) in family.scalars.items():
        values = file.kv.get(key)
        for il in range(len(values) if isinstance(values, np.ndarray) else 0):
            yield Written(f"{family.layers}.{il}.mlp.{end}", ()), shape


def _number(file: GGUFFile, family: Family, name: str) -> Array:
    key = next(key for end, (key, _) in family.scalars.items() if name.endswith(end))
    return np.asarray(cast("Array", file.kv[key])[int(name.split(".")[2])], np.float32)
