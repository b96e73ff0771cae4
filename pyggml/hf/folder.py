"""Open a Hugging Face folder as the loader wants it: metadata, and tensors that are read when they are wanted."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from pyggml.buffers.buffer import Buffer, Bytes, FetchedBuffer
from pyggml.errors import ModelError
from pyggml.gguf_io.bind import bound, read_only
from pyggml.gguf_io.read import GGUF_DEFAULT_ALIGNMENT
from pyggml.gguf_io.split import refuse_source
from pyggml.gguf_io.write import kv_record
from pyggml.tensor import Tensor

from .config import Config
from .families import find_family
from .family import Array, Family
from .metadata import read_metadata, rope_tensors
from .moves import Sizes
from .safetensors import StoredTensor, open_folder
from .tensors import TOWERS, HFTensor, Tensors, as_f32, count_nextn
from .tokenizer import read_tokenizer

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ROWS = 1 << 22  # elements that are read at a time


@dataclass(frozen=True, eq=False)
class HFFolder:
    """An open folder: `kv`, the metadata that its GGUF would have, and its tensors by their GGUF names. `made`: the
    values of those that follow from the config."""

    path: str
    family: Family
    kv: dict[str, Any]
    tensors: dict[str, HFTensor]
    made: dict[str, Array]
    alignment: int = GGUF_DEFAULT_ALIGNMENT

    @property
    def file_sizes(self) -> list[int]:
        """Bytes of each file that holds tensors."""
        return [len(data) for data in self.contents]

    @property
    def contents(self) -> list[Bytes]:
        """The contents of each file that holds tensors."""
        files = {p.source.file.path: p.source.file for t in self.tensors.values() for p in t.parts}
        return [file.data for file in files.values()]

    def records(self, without: Container[str]) -> list[bytes]:
        """The metadata as records of a GGUF file, without the keys in `without`."""
        kv = {key: value for key, value in self.kv.items() if key not in without}
        return [kv_record(key, np.float32(v) if isinstance(v, float) else v) for key, v in kv.items()]

    def rows(self, name: str, n_elements: int) -> Iterator[Bytes]:
        """See `HFTensor.rows`."""
        return self.tensors[name].rows(n_elements)

    def refuse_output(self, out: str) -> None:
        """Raises GGUFError when `out` is one of the folder's files, see `refuse_source`."""
        refuse_source(self.path, out)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder, that is a Hugging Face model rather than a GGUF file."""
    return os.path.isdir(path)


def _named(f: Callable[_P, _R]) -> Callable[_P, _R]:
    """Turn the exceptions that a damaged folder makes Python or NumPy raise into a ModelError that names the folder.
    Folders can be damaged in too many ways to check for each of them. The first argument of `f` is the folder's path,
    or an object with a `path`."""

    @wraps(f)
    def read(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            with np.errstate(over="raise", invalid="raise"):
                return f(*args, **kwargs)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, MemoryError) as e:
            where = getattr(args[0], "path", args[0])
            raise ModelError(f"{where}: holds what its model cannot have ({type(e).__name__}: {e})") from e

    return read


@_named
def open_hf_folder(path: str | os.PathLike[str], vocab_only: bool = False) -> HFFolder:
    """Read the metadata of a folder. Weights are only mapped; with `vocab_only` they are not looked for.

    Raises ModelError for a folder that holds no model, a model_type that is not known (naming similar ones), a key that
    is missing, and a tensor that is damaged or not known.
    """
    folder = Path(os.fspath(path))
    config = Config.of_folder(folder)
    try:
        family = find_family(config)
    except (TypeError, ValueError, AttributeError, LookupError):
        config.damaged()
    kv: dict[str, Any] = {"general.architecture": family.arch, "general.type": "model"}
    name = config.get("_name_or_path", "name_or_path", default=None)
    kv["general.name"] = Path(name).name if isinstance(name, str) and name else folder.resolve().name
    n_layer = config.n_layer
    stored = {} if vocab_only else open_folder(folder)
    stored = {name: t for name, t in stored.items() if not TOWERS.match(name)}
    config.n_nextn = count_nextn(family, n_layer, stored)
    try:
        kv |= read_metadata(family, config)
        made = {**rope_tensors(config), **family.made(config)}
        n_layer = max(n_layer, config.n_layer_decoder)
        sizes = sizes_of(family.arch, kv)
        scaled, untied = family.scaled(config), family.untied(config)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError):
        config.damaged()
    kv |= _media_keys(config)
    kv |= read_tokenizer(folder, config)
    if vocab_only:
        return HFFolder(str(folder), family, kv, {}, made)
    stored, numbers = _numbers(family, stored)
    kv |= numbers
    makers = Tensors(family, n_layer + config.n_nextn, sizes, scaled, config.n_nextn)
    wanted = _wanted(config, stored, untied, "tie_word_embeddings" not in family.told)
    config.asked.update((*family.told, *family.by_norm))
    config.refuse_unread()
    tensors = makers.make(wanted, made)
    for key, (role, value) in family.by_norm.items():
        said, there = config.get(key, default=False), any(name.endswith(f".{role}.weight") for name in tensors)
        if (bool(said) is value) is not there:
            config.fail(f"{key} is {said!r:.60}, but the checkpoint has {'a' if there else 'no'} {role}")
    embd, n_vocab = tensors.get("token_embd.weight"), sizes.ints("vocab_size")
    if family.padded and (embd is None or embd.ne[1] != n_vocab):  # otherwise padding could have any size
        config.fail(f"vocab_size = {n_vocab}: the embeddings have {0 if embd is None else embd.ne[1]} rows")
    return HFFolder(str(folder), family, kv, tensors, made)


def _media_keys(c: Config) -> dict[str, Any]:
    """What a text model has to know of the model that it is a part of: which model that is, and which tokens stand for
    a picture and for a sound. Empty for the folder of a text model."""
    found: dict[str, Any] = {}
    whole = c.outer or c.values  # Qwen2-VL's first configs have the keys of the text model among the others
    kind = whole.get("model_type")
    for media in ("image", "audio"):
        tokens = (whole.get(f"{media}_token_{x}") for x in ("id", "index"))
        token = next((t for t in tokens if type(t) is int and t >= 0), None)
        if isinstance(kind, str) and token is not None:
            found |= {"pyggml.media.family": kind, f"pyggml.media.{media}_token_id": token}
    if kind in ("minicpmv", "minicpmo"):  # whose placeholder is the vocabulary's <unk>
        found["pyggml.media.family"] = kind
    return found


def sizes_of(arch: str, kv: Mapping[str, Any]) -> Sizes:
    """The sizes that moves need, from the metadata."""

    def integer(key: str, default: int = 0) -> int:
        value = kv.get(f"{arch}.{key}", default)
        if isinstance(value, np.ndarray):
            value = next((v for v in cast("list[int]", value.tolist()) if v), default)
        if not isinstance(value, (int, np.integer)):  # in a file whose builder does not read this key
            raise ModelError(f"the key {arch}.{key} must be a whole number, not {value!r:.60}")
        return int(cast("int", value))

    n_head = integer("attention.head_count", 1)
    head = integer("embedding_length") // max(n_head, 1)
    return Sizes(
        n_head=n_head,
        n_head_kv=integer("attention.head_count_kv", n_head),
        head_k=integer("attention.key_length", head),
        head_v=integer("attention.value_length", head),
        n_rot=integer("rope.dimension_count", head),
        ints=integer,
    )


# The names of an encoder-decoder's embeddings. A checkpoint has one, two or all three of them.
_SHARED = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def _wanted(config: Config, stored: Mapping[str, StoredTensor], untied: bool, ties: bool) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint that the GGUF gets. Some checkpoints keep copies of the embeddings: for the output
    (when the family `ties` it) and for encoder and decoder; these are left out. `untied`: the output gets a copy."""
    embd = next((t for n, t in stored.items() if "embed" in n or "wte" in n), None)
    tied = ties and bool(config.get("tie_word_embeddings", default=True)) and embd is not None
    tied = tied and config.get("scale_decoder_outputs", default=None) is not False  # T5 1.1 in transformers 5
    shared = [name for name in _SHARED if name in stored]
    copies = {*shared[1:], *(("lm_head.weight",) if tied else ())}
    wanted = {name: t for name, t in stored.items() if name not in copies}
    if tied and untied and embd is not None:
        wanted["lm_head.weight"] = replace(embd, name="lm_head.weight")
    return wanted


def _numbers(family: Family, stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, Array]]:
    """Separate the tensors with one number for each layer. Returns the other tensors, and the keys that those numbers
    become."""
    rest: dict[str, StoredTensor] = {}
    found: dict[str, list[float]] = {}
    for name, t in stored.items():
        key = next((key for end, (key, _) in family.scalars.items() if name.endswith(end)), None)
        if key is None:
            rest[name] = t
            continue
        values = as_f32(t.stored()).reshape(-1)
        if values.size != 1:
            raise ModelError(f"{t.file.path}: the tensor {name} has {values.size} numbers instead of one")
        found.setdefault(key, []).append(float(values[0]))
    return rest, {key: np.asarray(values, np.float32) for key, values in found.items()}


@_named
def bind_folder(folder: HFFolder, use_mmap: bool = True, whole: bool = True) -> dict[str, Tensor]:
    """Make a tensor, which graphs read and never write, for each tensor of the folder; by name.

    A tensor that the mapped file holds unchanged lies in the mapping (with `use_mmap`). Others are read into memory:
    at once with `whole`, otherwise anew each time that someone looks at them. Raises as `read_tensor`."""
    buffers: dict[str, Buffer] = {}

    def memory(t: HFTensor) -> tuple[Buffer, int]:
        stored = t.mapped() if use_mmap else None
        if stored is None:
            return Buffer(read_tensor(t)) if whole else FetchedBuffer(None, lambda: read_tensor(t)), 0
        path = stored.file.path
        if path not in buffers:
            buffers[path] = read_only(stored.file.data, stored.file)
        return buffers[path], stored.offset

    return bound((t.name, t.dtype, t.ne, *memory(t)) for t in folder.tensors.values())


def read_tensor(t: HFTensor) -> Bytes:
    """A tensor's bytes, as its GGUF would store them, in new read-only memory. Raises ModelError when the shape is not
    as the config says, GGUFError when the file has become shorter."""
    memory = Buffer.allocate(t.nbytes).memory
    end = 0
    for rows in t.rows(_ROWS):
        memory[end : end + rows.size] = rows.reshape(-1)
        end += rows.size
    memory.flags.writeable = False
    return memory
