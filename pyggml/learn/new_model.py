"""New models to train from scratch: the metadata of a model that there is, and random weights."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.gguf_io.keys import Keys
from pyggml.gguf_io.write import GGUFOut, kv_record
from pyggml.hf.folder import HFFolder
from pyggml.hf.parts import read_object
from pyggml.llm.quantize.source import Source, open_source
from pyggml.models import get_architecture
from pyggml.models.metadata import Reader
from pyggml.models.weights import ShapeOnlyWeights
from pyggml.tensor import rank_of
from pyggml.types import Floats

from .checkpoint import MADE, role_of

STD = 0.02  # of the elements of matrices
_RESIDUAL = ("attn_output", "attn_out", "ffn_down", "ffn_down_exps", "ffn_down_shexp")  # add to the residual
_FILE_TYPE, _ALL_F32 = "general.file_type", np.uint32(0)


def write_new_model(like: str | os.PathLike[str], path: str | os.PathLike[str], seed: int = 0) -> None:
    """Write a GGUF file with a model as `like`, with random weights in F32.

    like  a GGUF file, whose metadata (sizes, tokenizer) and tensors' shapes it takes; or a folder with a config.json
          and the tokenizer of a Hugging Face model, which needs no weights. (The output is a weight of its own when
          `tie_word_embeddings` is false there.)

    Matrices are normal numbers with a standard deviation of 0.02. Those whose results are added to the residual are
    divided by sqrt(2 * layers), as GPT-2's. Norms are 1 and biases 0. Each weight has a seed of its own, from `seed`
    and its name.

    Raises ModelError and GGUFError for what cannot be read, and ModelError for an architecture with weights that begin
    in another way (decays of recurrences ...), by name.
    """
    source = open_source(like, vocab_only=True)
    shapes, made = _tensors_of(source)
    for name in shapes:
        _ = _kind(source.path, name, shapes[name])
    names = [*shapes, *(n for n in made if n not in shapes)]
    ne = {**shapes, **{n: a.shape[::-1] for n, a in made.items()}}
    records = [*source.records((_FILE_TYPE,)), kv_record(_FILE_TYPE, _ALL_F32)]
    arch = source.kv.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelError(f"{source.path}: the key general.architecture is missing or no string")
    n_layer = max(Reader(arch, source.kv).integer(Keys.LLM.BLOCK_COUNT), 1)
    with GGUFOut(path, records, [(n, DType.F32, ne[n]) for n in names], source.alignment) as out:
        for n in names:
            out.write_tensor([made[n]] if n in made else _initial(source.path, n, ne[n], seed, n_layer))


def _tensors_of(source: Source) -> tuple[dict[str, tuple[int, ...]], dict[str, Floats]]:
    """The ne of all weights to draw, and the values of those that follow from hyperparameters."""
    if not isinstance(source, HFFolder):
        found = {n: t.ne[: rank_of(t.ne)] for n, t in source.tensors.items()}
        made = {n: np.concatenate([*source.rows(n, 1 << 20)]).view(np.float32) for n in MADE if n in found}
        return {n: ne for n, ne in found.items() if n not in made}, made
    arch = source.kv["general.architecture"]
    architecture = get_architecture(arch)
    tied = bool(read_object(Path(source.path) / "config.json").get("tie_word_embeddings", True))
    weights = ShapeOnlyWeights(() if tied else ("output.weight",))
    asked = architecture.declare(architecture.hparams(arch, source.kv), weights).asked.values()
    made = {n: np.asarray(a, np.float32) for n, a in source.made.items()}
    needed = [s for s in asked if not s.optional or (s.name == "output.weight" and not tied)]
    return {s.name: s.ne for s in needed if s.name not in made}, made


def _kind(where: str, name: str, ne: tuple[int, ...]) -> str:
    """How a weight begins: as "normal" numbers, as "ones", or as "zeros"."""
    role = role_of(name)
    if name.endswith(".bias"):
        return "zeros"
    if role.endswith("norm") and len(ne) <= 2:
        return "ones"
    if name.endswith(".weight") and len(ne) > 1 and not role.startswith(("ssm_conv", "shortconv.conv", "time_mix")):
        return "normal"
    raise ModelError(f"{where}: how the weight {name} begins in a new model is not known")


def _initial(where: str, name: str, ne: tuple[int, ...], seed: int, n_layer: int) -> Iterator[Floats]:
    kind, shape = _kind(where, name, ne), ne[::-1]
    if kind != "normal":
        yield np.full(shape, float(kind == "ones"), np.float32)
        return
    rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
    std = STD / math.sqrt(2 * n_layer) if role_of(name) in _RESIDUAL else STD
    for _ in range(math.prod(shape[:-1])):
        yield rng.standard_normal(shape[-1], np.float32) * np.float32(std)
