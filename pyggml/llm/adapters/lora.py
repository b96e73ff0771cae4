"""LoRA adapters (arXiv:2106.09685): W x becomes W x + scale * B (A x)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple, Protocol
from weakref import WeakSet

import numpy as np

from pyggml.backends.quantize import dequantize
from pyggml.dtypes import DType
from pyggml.errors import ModelError, path_name
from pyggml.gguf_io.bind import bind
from pyggml.gguf_io.read import GGUF_DEFAULT_ALIGNMENT, open_gguf, says
from pyggml.gguf_io.write import GGUFOut, kv_record
from pyggml.logger import LOG
from pyggml.models.weights import Weights
from pyggml.ops.matmul import WEIGHT_TYPES
from pyggml.tensor import Tensor

MAX_SCALE = 1e30  # a weight times this is a finite F32
_A, _B = ".lora_a", ".lora_b"
TOKEN_EMBD, OUTPUT = "token_embd.weight", "output.weight"
_IN_NO_PRODUCT = re.compile(  # weights that an adapter cannot change: it adds to products. A test asks all graphs
    r"(norm(_\w+)?|\.act\.scales|(layer|hc)\w*_(scale|base)|_sinks|\bexp_probs_b"  # norms, factors and what is added
    r"|conv|conv1d(_[qkv])?|_init|_lerp_\w+|\btime_mix_(decay|first|ln)"  # convolutions and states
    r"|\bposition_embd|_ape|\brope_\w+|\b(per_layer_token_embd|token_types)"  # positions, and tables of rows
    r"|^cls(\.output)?|^dense_[23])(\.weight)?$"  # heads behind the text's vector
    r"|\bssm_[ad]$|\.bias$"
)


class Adaptable(Protocol):
    """The parts of a model that adapters need."""

    arch: str
    weights: Weights


class Pair(NamedTuple):
    """An adapter's two matrices for a weight of ne [k, m]: a ne [k, rank], b ne [rank, m] (for token embeddings a ne
    [rank, n_vocab], b ne [rank, n_embd]), and the factor of their product when the adapter's scale is 1. magnitude: of
    DoRA adapters, the length of each row of the changed weight, F32 ne [m], of experts [m, n_expert]."""

    a: Tensor
    b: Tensor
    factor: float
    magnitude: Tensor | None = None

    @property
    def rank(self) -> int:
        """The dimension that a and b share."""
        return self.b.ne[0]


class Lora:
    """A LoRA adapter; made by `Model.load_lora`. It may be set on contexts of any model that it fits.

    path   the file or folder it was read from
    arch   `general.architecture` of the models that it is for
    pairs  by the GGUF name of the weight
    """

    def __init__(self, path: str, arch: str, pairs: Mapping[str, Pair]) -> None:
        self.path, self.arch, self.pairs = path, arch, pairs
        self._fits: WeakSet[Adaptable] = WeakSet()

    @cached_property
    def digest(self) -> str:
        """A digest of all that the adapter does to a model: its weights' names, their matrices and factors."""
        from hashlib import sha256  # which loads OpenSSL

        h = sha256()
        for name, pair in sorted(self.pairs.items()):
            h.update(f"{name} {pair.factor!r}\n".encode())
            for t in (pair.a, pair.b, pair.magnitude):
                if t is not None:
                    h.update(f"{t.dtype.name} {t.ne}\n".encode() + t.tobytes())
        return h.hexdigest()

    def __repr__(self) -> str:
        ranks = sorted({p.rank for p in self.pairs.values()})
        return f"<Lora {self.arch} {self.path} {len(self.pairs)} weights of rank {', '.join(map(str, ranks))}>"

    def check(self, model: Adaptable) -> None:
        """Raises ModelError when the adapter does not fit the model: its architecture differs, or one of its weights is
        missing in the model or has another shape."""
        if model in self._fits:
            return
        if self.arch != model.arch:
            raise ModelError(
                f"{self.path}: an adapter for {self.arch!r}, the model is of the architecture {model.arch!r}"
            )
        for name, pair in self.pairs.items():
            known = model.weights.get(name)
            if known is None and name == OUTPUT:
                known = model.weights.get(TOKEN_EMBD)  # the embeddings are the output too
            if known is not None and _IN_NO_PRODUCT.search(name):
                raise ModelError(f"{self.path}: an adapter of {name} changes nothing: no product has that weight")
            if known is None:
                raise ModelError(f"{self.path}: the model has no weight {name} (is it another model's adapter?)")
            _check_shapes(self.path, name, known, pair)
        self._fits.add(model)


def load_lora_gguf(path: str | os.PathLike[str]) -> Lora:
    """The adapter in a GGUF file of llama.cpp's kind: general.type `adapter`, adapter.type `lora`, adapter.lora.alpha,
    and tensors NAME.lora_a and NAME.lora_b.

    Raises GGUFError for a bad file, ModelError for a file that is not such an adapter.
    """
    file = open_gguf(path_name(path, ModelError))
    for key, want in (("general.type", "adapter"), ("adapter.type", "lora")):
        if not says(file.kv, key, want):
            raise ModelError(f"{file.path}: is no LoRA adapter: {key} is {file.kv.get(key)!r:.60}, not {want!r}")
    if "adapter.alora.invocation_tokens" in file.kv:
        raise ModelError(f"{file.path}: adapters that some tokens switch on (aLoRA) are not supported")
    arch = file.kv.get("general.architecture")
    alpha = file.kv.get("adapter.lora.alpha", 0.0)
    if not isinstance(arch, str) or isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise ModelError(f"{file.path}: general.architecture must be a string, adapter.lora.alpha a number")
    if not abs(alpha) <= MAX_SCALE:
        raise ModelError(f"{file.path}: adapter.lora.alpha is {alpha:g}, not from -{MAX_SCALE:g} to {MAX_SCALE:g}")
    return Lora(file.path, arch, pairs_of(file.path, bind(file), alpha))


def refuse_dora(lora: Lora, path: str | os.PathLike[str]) -> None:
    """Raises ModelError for a DoRA adapter, which cannot become the GGUF file `path`."""
    dora = next((name for name, p in lora.pairs.items() if p.magnitude is not None), None)
    if dora is not None:
        text = "GGUF adapters have no magnitudes (DoRA); write a PEFT folder, or a model with `pyggml merge-lora`"
        raise ModelError(f"{os.fspath(path)}: {dora}: {text}")


def save_lora(lora: Lora, path: str | os.PathLike[str]) -> None:
    """Write an adapter as a GGUF file that llama.cpp reads; the file appears when it is complete. When no single alpha
    gives the factor of every pair, the factors are multiplied into B, which then becomes F32. Raises OSError;
    ModelError for a DoRA adapter."""
    refuse_dora(lora, path)
    alphas = {p.factor * p.rank for p in lora.pairs.values()}
    alpha = alphas.pop() if len(alphas) == 1 else 0.0
    tensors: list[tuple[str, Tensor, bytes]] = []
    for name, p in lora.pairs.items():
        tensors.append((name + _A, p.a, p.a.tobytes()))
        b = p.b.tobytes()
        if not alpha and p.factor != 1.0:
            b = (dequantize(b, p.b.dtype) * np.float32(p.factor)).tobytes()
        tensors.append((name + _B, p.b, b))
    kv = {"general.architecture": lora.arch, "general.type": "adapter", "adapter.type": "lora"}
    records = [kv_record(key, value) for key, value in kv.items()]
    records.append(kv_record("adapter.lora.alpha", np.float32(alpha)))
    infos = [(n, t.dtype if len(data) == t.nbytes else DType.F32, t.ne[: t.rank]) for n, t, data in tensors]
    with GGUFOut(path, records, infos, GGUF_DEFAULT_ALIGNMENT) as out:
        for _, _, data in tensors:
            out.write_tensor([np.frombuffer(data, np.uint8)])


def pairs_of(path: str, tensors: Mapping[str, Tensor], alpha: float) -> dict[str, Pair]:
    """The pairs among an adapter's tensors. Raises ModelError for half a pair, and for any other tensor."""
    pairs: dict[str, Pair] = {}
    skipped: list[str] = []
    for name, t in tensors.items():
        weight = name.removesuffix(_A).removesuffix(_B)
        if weight == name:
            if not name.endswith("_norm.weight"):
                raise ModelError(f"{path}: {name} is neither NAME{_A} nor NAME{_B}")
            skipped.append(name)
            continue
        a, b = tensors.get(weight + _A), tensors.get(weight + _B)
        if a is None or b is None:
            raise ModelError(f"{path}: {t.describe()} has no other half: there is no {weight}{_B if b is None else _A}")
        for half in (a, b):
            if half.dtype in WEIGHT_TYPES and not np.isfinite(dequantize(half.tobytes(), half.dtype)).all():
                raise ModelError(f"{path}: {half.describe()} holds numbers that are not finite")
        rank = b.ne[0]
        pairs[weight] = Pair(a, b, alpha / rank if alpha else 1.0)
    if skipped:
        LOG.warning("%s: norms in adapters are not used, as in llama.cpp: %s", path, ", ".join(skipped))
    return pairs


def _check_shapes(path: str, name: str, weight: Tensor, pair: Pair) -> None:
    a, b, w = pair.a.ne, pair.b.ne, weight.ne
    rank = b[0]
    want = ((rank, w[1]), (rank, w[0])) if name == TOKEN_EMBD else ((w[0], rank), (rank, w[1]))
    if (a, b) != tuple((*ne, *w[2:]) for ne in want):
        raise ModelError(
            f"{path}: the adapter does not fit the weight {weight.describe()}: {pair.a.describe()}, {pair.b.describe()}"
        )
    if pair.magnitude is not None and (name == TOKEN_EMBD or pair.magnitude.ne != (*w[1:], 1)):
        raise ModelError(f"{path}: {pair.magnitude.describe()} does not fit the weight {weight.describe()}")
    for t in (pair.a, pair.b):
        if t.dtype not in WEIGHT_TYPES:
            raise ModelError(f"{path}: no product takes the type of {t.describe()}")
