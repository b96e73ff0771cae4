"""LoRA adapters of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from pyggml import limits
from pyggml.codec import Array
from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.gguf_io.keys import Keys
from pyggml.hf.export import Written, planned
from pyggml.hf.families import families_of_arch
from pyggml.hf.family import Family
from pyggml.hf.folder import sizes_of
from pyggml.hf.moves import TRANSPOSED, Move, Sizes, Value
from pyggml.hf.parts import read_object
from pyggml.hf.safetensors import StoredTensor, open_file, write_file
from pyggml.hf.tensors import Tensors, as_f32
from pyggml.models.hparams import MAX_LAYERS
from pyggml.models.metadata import Reader
from pyggml.system.files import sync_folder, sync_tree
from pyggml.tensor import Context, Tensor

from .dora import row_squares
from .lora import OUTPUT, TOKEN_EMBD, Adaptable, Lora, Pair

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_NUMBER = 1e9  # the largest rank or alpha
_HALF = re.compile(r"^(?:base_model\.model\.)?(.*)\.lora_(embedding_)?([AB])(?:\.\w+)??(?:\.weight)?$")
_MAGNITUDE = re.compile(r"^(?:base_model\.model\.)?(.*)\.lora_magnitude_vector(?:\.\w+)??(?:\.weight)?$")
_EXPERT = re.compile(r"^(.*\bexperts)\.(\d+)\.(.*)$")
_REFUSED = (  # options that do more than add B A x to W x
    *("lora_bias", "modules_to_save", "layer_replication", "trainable_token_indices", "target_parameters"),
    *("alora_invocation_tokens", "use_bdlora", "arrow_config"),
)


class PeftTarget(Adaptable, Protocol):
    """The model that an adapter is for."""

    kv: Mapping[str, Any]


@dataclass(frozen=True)
class _Half:
    """A and B of one module of the checkpoint, and the factor of their product."""

    module: str
    a: StoredTensor
    b: StoredTensor
    factor: float
    embedding: bool
    magnitude: StoredTensor | None = None

    def fail(self, why: str) -> ModelError:
        path, shapes = self.a.file.path, f"A {list(self.a.shape)}, B {list(self.b.shape)}"
        return ModelError(f"{path}: the adapter of {self.module} ({shapes}) {why}")


class _Part(NamedTuple):
    """A and B of one weight or of one expert, the factor of their product, and of DoRA the magnitudes of the rows."""

    a: Array
    b: Array
    factor: float
    magnitude: Array | None = None


def load_lora_peft(folder: Path, model: PeftTarget) -> Lora:
    """The adapter in a folder, for that model. Handles ranks and alphas by pattern, rank-stabilised scales, embeddings
    and tied embeddings, and magnitudes (DoRA). The adapter's matrices are moved as the model's weights were when its
    GGUF was made.

    Raises ModelError for a folder without such an adapter, for an adapter that does more than add low-rank products
    (whole modules ...), and for a module, which it names, that is unknown or of other shapes.
    """
    config = read_object(folder / CONFIG)
    if not config:
        raise ModelError(f"{folder}: has no {CONFIG}: neither a GGUF file nor a PEFT folder")
    _check_config(folder, config)
    halves = _halves(folder, config, _Patterns(str(folder / CONFIG), config))
    family = families_of_arch(model.arch)[0]
    r = Reader(model.arch, model.kv)
    n_layer = max(r.integer(Keys.LLM.BLOCK_COUNT, 0), r.integer(Keys.LLM.DECODER_BLOCK_COUNT, 0))
    if n_layer > MAX_LAYERS:  # a builder without a decoder does not look at the second
        r.fail(Keys.LLM.DECODER_BLOCK_COUNT, f"is {n_layer}: more than the {MAX_LAYERS} layers supported")
    names = Tensors(family, n_layer, sizes_of(model.arch, model.kv))
    found: dict[str, dict[int, _Part]] = {}
    for half in halves:
        if half.embedding:
            found[TOKEN_EMBD] = {-1: _Part(half.a.stored().T, half.b.stored(), half.factor)}
            if config.get("ensure_weight_tying") and not any(h.module.endswith("lm_head") for h in halves):
                found[OUTPUT] = {-1: _Part(half.b.stored().T, half.a.stored().T, half.factor)}
            continue
        found_expert = _EXPERT.match(half.module)
        module, expert = (
            (f"{found_expert[1]}.{found_expert[3]}", int(found_expert[2])) if found_expert else (half.module, -1)
        )
        for name, pair in _moved(half, module, names, model):
            if expert in found.setdefault(name, {}):
                raise half.fail(f"is for {name}, which has one already")
            found[name][expert] = pair
    ctx = Context()
    pairs = {name: _pair(ctx, name, of, model) for name, of in found.items()}
    return Lora(str(folder), model.arch, pairs)


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    path = folder / CONFIG
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type is {kind!r:.40}; only LORA is supported")
    refused = [key for key in _REFUSED if config.get(key)]
    if config.get("bias", "none") != "none":
        refused.append("bias")
    if refused:
        raise ModelError(f"{path}: {', '.join(refused)}: only adapters that add low-rank products are supported")
    for key in ("r", "lora_alpha"):
        if not _positive(config.get(key)):
            raise ModelError(f"{path}: {key} must be a positive number, not {config.get(key)!r:.40}")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise ModelError(f"{path}: {key} must be an object, not {config[key]!r:.40}")


def _positive(value: object) -> bool:
    """Whether the value can be a rank or an alpha."""
    return type(value) in (int, float) and 0 < cast("float", value) <= _MAX_NUMBER


def _halves(folder: Path, config: Mapping[str, Any], patterns: _Patterns) -> list[_Half]:
    stored: dict[tuple[str, bool], dict[str, StoredTensor]] = {}
    magnitudes: dict[str, StoredTensor] = {}
    for name, t in open_file(folder / WEIGHTS).items():
        if config.get("use_dora") and (of_row := _MAGNITUDE.match(name)):
            if len(t.shape) not in (1, 2) or max(t.shape) != math.prod(t.shape):
                raise ModelError(f"{folder / WEIGHTS}: the tensor {name} of shape {list(t.shape)} is no vector")
            magnitudes[of_row[1]] = t
            continue
        found = _HALF.match(name)
        if found is None:
            raise ModelError(f"{folder / WEIGHTS}: the tensor {name} is no A or B of a LoRA adapter")
        if len(t.shape) != 2 or not all(t.shape):
            raise ModelError(f"{folder / WEIGHTS}: the tensor {name} of shape {list(t.shape)} is no matrix")
        of = stored.setdefault((found[1], bool(found[2])), {})
        if found[3] in of:
            raise ModelError(f"{folder / WEIGHTS}: {name} and {of[found[3]].name} are one half of the same adapter")
        if not np.isfinite(as_f32(t.stored())).all():
            raise ModelError(f"{folder / WEIGHTS}: the tensor {name} holds numbers that are not finite")
        of[found[3]] = t
    halves: list[_Half] = []
    for (module, embedding), of in stored.items():
        if len(of) < 2:
            raise ModelError(f"{folder / WEIGHTS}: {next(iter(of.values())).name} has no other half")
        rank, alpha = patterns.value("rank", "r", module), patterns.value("alpha", "lora_alpha", module)
        half = _Half(
            module,
            of["A"],
            of["B"],
            alpha / (math.sqrt(rank) if config.get("use_rslora") else rank),
            embedding,
            magnitudes.pop(module, None),
        )
        if config.get("use_dora") and (half.magnitude is None or embedding):
            raise half.fail("has no magnitudes (lora_magnitude_vector)" if not embedding else "is DoRA of embeddings")
        if half.magnitude is not None and math.prod(half.magnitude.shape) != half.b.shape[0]:
            raise half.fail(f"has {math.prod(half.magnitude.shape)} magnitudes")
        if (half.a.shape[0], half.b.shape[1]) != (rank, rank):
            raise half.fail(f"is not of rank {rank:g}, as {CONFIG} says")
        halves.append(half)
    if magnitudes:
        raise ModelError(f"{folder / WEIGHTS}: {next(iter(magnitudes.values())).name} has no A and B")
    if not halves:
        raise ModelError(f"{folder / WEIGHTS}: holds no tensors")
    return halves


class _Patterns:
    """`rank_pattern` and `alpha_pattern` of a config: regular expressions of modules -> values. A hostile expression
    may take forever, so all matching ends after `limits.PATTERN_SECONDS`."""

    def __init__(self, path: str, config: Mapping[str, Any]) -> None:
        self._path, self._config, self._left = path, config, float(limits.PATTERN_SECONDS)

    def value(self, what: str, default: str, module: str) -> float:
        """The value of the first pattern that matches the end of a module's name, as in PEFT; `default` when none
        matches. Raises ModelError."""
        for pattern, value in cast("dict[str, Any]", self._config.get(f"{what}_pattern") or {}).items():
            if self._matches(f"{what}_pattern", pattern, module):
                if not _positive(value):
                    raise ModelError(f"{self._path}: {what}_pattern: {pattern!r:.60}: {value!r:.40} is no such number")
                return float(value)
        return float(self._config[default])

    def _matches(self, key: str, pattern: str, module: str) -> bool:
        import regex  # takes a while to import

        start = time.monotonic()
        try:
            if len(pattern) > limits.PATTERN_CHARS:
                raise regex.error(f"it has over {limits.PATTERN_CHARS} characters")
            if self._left <= 0:
                raise TimeoutError
            return regex.match(rf"(.*\.)?({pattern})$", module, timeout=self._left) is not None
        except TimeoutError:
            raise ModelError(
                f"{self._path}: {key}: matching {pattern!r:.60} takes over {limits.PATTERN_SECONDS} seconds: "
                "simplify it (pyggml.limits.PATTERN_SECONDS)"
            ) from None
        except (regex.error, RecursionError, OverflowError) as e:
            raise ModelError(f"{self._path}: {key}: {pattern!r:.60} is no regular expression: {e}") from None
        finally:
            self._left -= time.monotonic() - start


def _moved(half: _Half, module: str, names: Tensors, model: PeftTarget) -> list[tuple[str, _Part]]:
    """A and B of each GGUF tensor that the module's weight becomes."""
    a, b = half.a.stored(), half.b.stored()
    if half.magnitude is not None:  # goes with the rows of B, as one more column
        a, b = as_f32(a), np.hstack([as_f32(b), as_f32(half.magnitude.stored()).reshape(-1, 1)])
    merged = next((s for end, s in names.family.merged.items() if f"{module}.weight".endswith(end)), None)
    if merged is None:
        name = names.name(f"{module}.weight")
        if name is None:
            raise half.fail(f"is not known to {names.family.types[0]}")
        parts = [(name, b)]
    else:
        layer = re.search(r"\.(\d+)\.", module)
        roles = [f"blk.{layer[1]}.{role}.weight" for role in merged.roles] if layer else []
        try:
            parts = list(zip(roles, merged.there(b, names.sizes), strict=True))
        except (ValueError, IndexError) as e:
            raise half.fail(f"cannot be split as the weight is: {e}") from None
    out: list[tuple[str, _Part]] = []
    for name, part in parts:
        for step in names.family.moves_of(name):
            if step is not TRANSPOSED:  # the weight is stored [inputs, outputs], A and B are not
                part = _rows(half, step, part, names.sizes)
        if half.magnitude is not None:
            if part.ndim != 2:
                raise half.fail("has magnitudes (DoRA), and is for a weight that is stored in another way")
            out.append((name, _Part(a, part[:, :-1], half.factor, part[:, -1])))
            continue
        weight = model.weights.get(name)
        if part.ndim == 3 and weight is not None and part.shape[-1] == weight.ne[0] != part.shape[-2]:
            part, low = np.swapaxes(a, 0, 1), part  # latent attention's K is transposed: (B A)' = A' B'
        else:
            low = a
        if part.ndim != low.ndim:  # one for all heads
            n = max(len(x) for x in (part, low) if x.ndim == 3)
            part, low = (np.broadcast_to(x, (n, *x.shape[-2:])) for x in (part, low))
        out.append((name, _Part(low, part, half.factor)))
    return out


def _rows(half: _Half, step: Move | Value, b: Array, sizes: Sizes) -> Array:
    """B with its rows moved as the weight's rows are. Raises ModelError for a step that does more than move rows."""
    try:
        if isinstance(step, Move):
            moved = step.there(b, sizes)
            left, right = np.arange(1, len(b) + 1)[:, None], np.arange(1, half.a.shape[1] + 1)[None]
            if np.array_equal(step.there(left * right, sizes), step.there(left, sizes) * right):
                return moved
    except (ValueError, IndexError):
        pass
    raise half.fail("is for a weight that is stored in another way than row by row")


def _pair(ctx: Context, name: str, of: Mapping[int, _Part], model: PeftTarget) -> Pair:
    """The pair of one tensor: of all experts together, with zeros for experts that the adapter does not change."""
    if -1 in of:
        a, b, factor, m = of[-1]
        magnitude = None if m is None else _tensor(ctx, f"{name}.lora_magnitude", m)
        return Pair(_tensor(ctx, f"{name}.lora_a", a), _tensor(ctx, f"{name}.lora_b", b), factor, magnitude)
    weight = model.weights.get(name)
    n_expert = 0 if weight is None else weight.ne[2]
    if max(of) >= n_expert:
        raise ModelError(f"{name}: the adapter is for expert {max(of)}, the model has {n_expert}")
    rank = max(len(part.a) for part in of.values())
    first_a, first_b, _, _ = next(iter(of.values()))
    magnitudes = [of[i].magnitude for i in sorted(of)]
    magnitude = None
    if any(m is not None for m in magnitudes):
        if len(of) < n_expert:
            raise ModelError(f"{name}: the adapter has magnitudes (DoRA) for {len(of)} of {n_expert} experts")
        magnitude = _tensor(ctx, f"{name}.lora_magnitude", np.stack([m for m in magnitudes if m is not None]))
    all_a = np.zeros((n_expert, rank, first_a.shape[1]), np.float32)
    all_b = np.zeros((n_expert, first_b.shape[0], rank), np.float32)
    for i, (a, b, factor, _) in of.items():
        if (a.shape[1], len(b)) != (first_a.shape[1], len(first_b)):
            raise ModelError(f"{name}: the adapters of its experts have different shapes: {a.shape}, {first_a.shape}")
        all_a[i, : len(a)], all_b[i, :, : len(a)] = as_f32(a), as_f32(b) * np.float32(factor)
    return Pair(_tensor(ctx, f"{name}.lora_a", all_a), _tensor(ctx, f"{name}.lora_b", all_b), 1.0, magnitude)


def _tensor(ctx: Context, name: str, a: Array) -> Tensor:
    """A leaf with these elements, in the type of the array."""
    types: Sequence[tuple[str, DType]] = (("uint16", DType.BF16), ("float16", DType.F16), ("float32", DType.F32))
    dtype = next((dtype for kind, dtype in types if a.dtype == kind), None)
    if dtype is None:
        raise ModelError(f"{name}: adapters of {a.dtype} are not supported; F32, F16 and BF16 are")
    return ctx.from_bytes(np.ascontiguousarray(a).tobytes(), dtype, a.shape[::-1], name)


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stored:
    """A tensor of a model, as far as its name and shape say how a checkpoint has it."""

    name: str
    ne: tuple[int, ...]
    n_dims: int


@dataclass(frozen=True)
class _Tensors:
    tensors: Mapping[str, Any]


def save_lora_peft(pairs: Mapping[str, Pair], folder: Path, model: PeftTarget) -> None:
    """Write A and B of each weight, by GGUF names, as a PEFT folder for the checkpoint of `model`. The rows of B are
    moved back to where the checkpoint has them; adapters of weights that are one there become one. The folder appears
    when it is complete; it must not exist yet.

    Raises ModelError for a folder that is there, and for a weight that no adapter of the checkpoint can change alone
    (its name is not known, or its inputs are moved, or it is a part of a tensor of all experts).
    """
    if folder.exists():
        raise ModelError(f"{folder}: is there already; name another folder")
    config, arrays = peft_files(pairs, model)
    temporary = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.tmp"
    try:
        temporary.mkdir(parents=True)
        (temporary / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        write_file(temporary / WEIGHTS, arrays)
        sync_tree(temporary)
        os.rename(temporary, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def peft_files(pairs: Mapping[str, Pair], model: PeftTarget) -> tuple[dict[str, Any], dict[str, Array]]:
    """The config and the tensors of the PEFT folder that `save_lora_peft` writes. Raises ModelError for a weight, as
    there."""
    family, sizes = families_of_arch(model.arch)[0], sizes_of(model.arch, model.kv)
    found = _Tensors({n: _Stored(n, t.ne, t.rank) for n, t in model.weights.items()})
    arrays: dict[str, Array] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for w in planned(found, family, sizes):
        names = [t.name for t in w.sources if t.name in pairs]
        if not names:
            continue
        if not w.name.endswith(".weight"):
            raise ModelError(f"{names[0]} is {w.name} in the checkpoint: PEFT has no adapter for it; write a GGUF file")
        module = w.name.removesuffix(".weight")
        dora = any(pairs[n].magnitude is not None for n in names)
        a, b, factor = _of_checkpoint(w, pairs, family, sizes, model, dora)
        if dora:
            b, m = b[:, :-1], b[:, -1]
            arrays[f"base_model.model.{module}.lora_magnitude_vector"] = np.ascontiguousarray(m)
        arrays[f"base_model.model.{module}.lora_A.weight"] = np.ascontiguousarray(a)
        arrays[f"base_model.model.{module}.lora_B.weight"] = np.ascontiguousarray(b)
        ranks[module], alphas[module] = len(a), factor * len(a)
    missing = pairs.keys() - {n for w in planned(found, family, sizes) for n in (t.name for t in w.sources)}
    if missing:
        raise ModelError(f"{min(missing)}: the checkpoint has no such tensor")
    r, alpha = _usual(ranks), _usual(alphas)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model.kv.get("general.name", "")),
        "r": r,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_dora": any(p.magnitude is not None for p in pairs.values()),
        "bias": "none",
        "fan_in_fan_out": any(TRANSPOSED in family.moves_of(n) for n in pairs),
        "target_modules": sorted(ranks),
        "rank_pattern": {m: n for m, n in ranks.items() if n != r},
        "alpha_pattern": {m: n for m, n in alphas.items() if n != alpha},
    }
    return config, arrays


def _of_checkpoint(
    w: Written, pairs: Mapping[str, Pair], family: Family, sizes: Sizes, model: PeftTarget, dora: bool
) -> tuple[Array, Array, float]:
    """A and B of a tensor of the checkpoint, and the factor of their product. With `dora` B has the magnitudes as one
    more column, because they go where its rows go. When the tensor holds several weights, A has the rows of all their
    As, one after the other; in B each weight has its columns, and zeros in those of the others."""
    own = [pairs[t.name] for t in w.sources if t.name in pairs]
    if w.merged is not None and (w.expert >= 0 or any(p.b.rank != 2 for p in own)):
        name = next(t.name for t in w.sources if t.name in pairs)
        text = "PEFT has no adapter for it alone; write a GGUF file"
        raise ModelError(f"{name} is a part of {w.name} in the checkpoint: {text}")
    at, rank = 0, sum(p.rank for p in own)
    parts: list[Array] = []
    for t in w.sources:
        pair = pairs.get(t.name)
        if pair is None:
            b = np.zeros((t.ne[1], rank), np.float32)
            lengths = np.sqrt(row_squares(model.weights[t.name])) if dora else None
        else:
            b = as_f32(np.asarray(pair.b.numpy()))
            if len(own) > 1:
                b = np.pad(b * np.float32(pair.factor), ((0, 0), (at, rank - at - pair.rank)))
            lengths = None if pair.magnitude is None else pair.magnitude.numpy()
            at += pair.rank
        if lengths is not None:
            b = np.concatenate([b, lengths[..., None]], axis=-1)
        b = b[w.expert] if w.expert >= 0 else b
        for step in reversed(family.moves_of(t.name)):
            if isinstance(step, Value) or b.ndim != 2:
                raise ModelError(f"{t.name}: its elements are changed on the way to {w.name}")
            b = b if step is TRANSPOSED else step.back(b, sizes)
        parts.append(b)
    b = parts[0]
    if w.merged is not None:
        b = w.merged.back(parts, sizes)
        if b.shape != (sum(map(len, parts)), parts[0].shape[1]):
            raise ModelError(f"{w.sources[0].name}: is merged into {w.name} in another way than row by row")
    a = [as_f32(np.asarray(p.a.numpy())) for p in own]
    return np.concatenate([x[w.expert] if w.expert >= 0 else x for x in a]), b, own[0].factor if len(own) == 1 else 1.0


def _usual(values: Mapping[str, Any]) -> Any:
    """The value that most modules have."""
    return Counter(values.values()).most_common(1)[0][0]
