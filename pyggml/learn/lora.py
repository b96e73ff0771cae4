"""Low-rank adapters to train (LoRA, arXiv 2106.09685): the weights stay, and a product of two small matrices is added
to what each of them gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyggml import ops
from pyggml.errors import ModelError, OneSite, whole
from pyggml.graph import Graph
from pyggml.llm.adapters.dora import norms, row_squares
from pyggml.llm.adapters.lora import Lora, Pair
from pyggml.models.blocks import Adapters, Build, LowRank
from pyggml.tensor import Context, Tensor
from pyggml.types import Floats

from .checkpoint import Origin, origin_of, role_of

if TYPE_CHECKING:
    from pyggml.hf.folder import HFFolder
    from pyggml.llm.loaded import LoadedModel

ALL_LINEAR = "all-linear"  # as a target: all products of the model but the output
Init = Callable[[str, tuple[int, ...]], Any]


@dataclass(frozen=True)
class LoRA:
    """What `Model.trainer` trains instead of weights: for each target W the matrices A and B of W + alpha / r * B A.

    r        the rank of the products
    alpha    the factor of the products, times r
    targets  roles of weights, as in GGUF names ("attn_q", "ffn_down_exps"), or patterns of roles or names ("attn_*",
             "blk.3.*"). Those of experts get matrices for each expert. ("all-linear",): all but the output
    init     gives A of a weight: (its GGUF name, the shape in NumPy order: (r, n_in), of experts (n_expert, r, n_in))
             -> array. None: uniform numbers of up to 1 / sqrt(n_in), as the PEFT library draws them. B begins as zeros
    seed     of these numbers
    rslora   divide alpha by the root of r instead of r, so that large ranks learn as fast (rsLoRA, arXiv 2312.03732)
    dora     train the lengths of the rows of the changed weights, too (DoRA, arXiv 2402.09353). Gradients do not pass
             through the norms that the rows are divided by, as in the PEFT library

    Raises ModelError for numbers that make no sense.
    """

    r: int = 8
    alpha: float = 16.0
    targets: Sequence[str] = ("attn_q", "attn_v")
    init: Init | None = None
    seed: int = 0
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        whole("LoRA: r", self.r, 1, error=ModelError)
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)) or not 0 < self.alpha < math.inf:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(f"LoRA: alpha must be a positive number, not {self.alpha!r:.40}")
        whole("LoRA: seed", self.seed, 0, error=ModelError)
        several = isinstance(self.targets, Sequence) and not isinstance(self.targets, str)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not several or not all(isinstance(t, str) and t for t in self.targets):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(f"LoRA: targets must be a list of roles or patterns, not {self.targets!r:.60}")
        if not self.targets:
            raise ModelError("LoRA: targets must name at least one role")

    @property
    def factor(self) -> float:
        """What the products are multiplied with."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


class Matrices(NamedTuple):
    """A and B of one weight, leafs: A ne [n_in, r], B ne [r, n_out]; of experts there are as many of both. Of DoRA the
    magnitudes, a leaf, and the norms of the rows of the changed weight as they were when a step began: both ne [n_out],
    of experts [n_out, n_expert]. `measures` computes the norms."""

    a: Tensor
    b: Tensor
    origin: Origin
    magnitude: Tensor | None = None
    norm: Tensor | None = None
    measures: Graph | None = None

    @property
    def trained(self) -> list[Tensor]:
        """The parameters."""
        return [t for t in (self.a, self.b, self.magnitude) if t is not None]


class Products(Adapters):
    """Notes the weights that graphs add low-rank products to. `names`: their names."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        super().__init__({}, {})

    def product(self, out: Tensor, weight: str, cur: Tensor, ids: Tensor | None = None) -> Tensor:
        """`out`, unchanged."""
        self.names[weight] = None
        return out


def targets_of(model: LoadedModel, lora: LoRA) -> list[str]:
    """The names of the weights that the targets of `lora` match, in the order of the model's graph. Raises ModelError,
    which names the roles there are, for a target that matches none."""
    noted, architecture = Products(), model.architecture
    memory = architecture.new_memory(model.hparams, 1, n_batch=1, transient=True)
    sizes = tuple(1 if c.cross else c.size for c in memory.caches)  # one token is encoded
    b = Build(model.hparams, model.weights, memory, 1, 1, sizes, adapters=noted)
    if architecture.encode is not None and memory.encoding is not None:
        sizes = tuple(c.size for c in memory.encoding.caches)
        encoder = Build(model.hparams, model.weights, memory.encoding, 1, 1, sizes, adapters=noted)
        architecture.encode(encoder)
        b.kept.update(encoder.kept)
    architecture.build(b)
    names = [n for n in noted.names if n in model.weights]  # not an output that is the embeddings
    chosen: set[str] = set()
    for target in lora.targets:
        if target == ALL_LINEAR:
            chosen.update(n for n in names if role_of(n) != "output")
            continue
        found = [n for n in names if fnmatchcase(role_of(n), target) or fnmatchcase(n, target)]
        if not found:
            roles = ", ".join(sorted({*map(role_of, names)}))
            raise ModelError(f"LoRA: no product of this model reads a weight {target!r}; there are {roles}")
        chosen.update(found)
    return [n for n in names if n in chosen]


def new_adapters(
    ctx: Context, model: LoadedModel, lora: LoRA, names: Sequence[str], folder: HFFolder | None
) -> dict[str, Matrices]:
    """A and B of each of the weights `names`. Raises ModelError when `init` gives what is no such A."""
    rng = np.random.default_rng(lora.seed)
    made: dict[str, Matrices] = {}
    for name in names:
        n_in, n_out, *n_experts = model.weights[name].ne[: max(model.weights[name].rank, 2)]
        shape = (*n_experts[::-1], lora.r, n_in)
        a = _initial(lora, name, shape, rng)
        b = np.zeros((*shape[:-2], n_out, lora.r), np.float32)
        leafs = [ctx.from_numpy(x, name=f"{name}.lora_{end}").set_param() for x, end in ((a, "a"), (b, "b"))]
        made[name] = Matrices(leafs[0], leafs[1], origin_of(folder, name) or Origin(name))
        if lora.dora:
            made[name] = _with_magnitude(ctx, lora, name, model.weights[name], made[name])
    return made


def _with_magnitude(ctx: Context, lora: LoRA, name: str, weight: Tensor, m: Matrices) -> Matrices:
    if m.origin.scale is not None:
        raise ModelError(f"LoRA: {name} is the checkpoint's weight times a factor: dora=True is not supported for it")
    squares = row_squares(weight)
    lengths = np.sqrt(squares)
    if not lengths.all():
        raise ModelError(f"LoRA: {name} has a row of zeros, which has no direction: dora=True is not for it")
    magnitude = ctx.from_numpy(lengths, name=f"{name}.lora_magnitude").set_param()
    norm = ctx.from_numpy(lengths, name=f"{name} (norms)")
    with ctx, OneSite():
        scale = ctx.from_numpy(np.array([lora.factor], np.float32))
        now = norms(weight, ctx.from_numpy(squares), m.a, m.b, scale)
        measures = Graph().build_forward_expand(ops.cpy(now, norm))
    return m._replace(magnitude=magnitude, norm=norm, measures=measures)


def _initial(lora: LoRA, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    if lora.init is None:
        limit = 1.0 / math.sqrt(shape[-1])  # Kaiming's uniform with a = sqrt(5)
        return rng.uniform(-limit, limit, shape).astype(np.float32)
    try:
        a = np.asarray(lora.init(name, shape), np.float32)
    except (TypeError, ValueError) as e:
        raise ModelError(f"LoRA: init gives no array of numbers for {name}: {e}") from e
    if a.shape != shape or not np.isfinite(a).all():
        raise ModelError(f"LoRA: init must give finite numbers of shape {shape} for {name}, not of {a.shape}")
    return np.ascontiguousarray(a)


def adapters_of(ctx: Context, lora: LoRA, matrices: Mapping[str, Matrices]) -> Adapters:
    """What graphs are built with, recorded in `ctx`. When the rows of a weight are those of its checkpoint times a
    factor, so are those of its B."""
    scale = ctx.from_numpy(np.array([lora.factor], np.float32), name="lora_scale")
    with ctx:
        low_rank = {
            name: [
                LowRank(
                    m.a,
                    m.origin.scaled(ctx, m.b),
                    scale,
                    None if m.magnitude is None or m.norm is None else ops.div(m.magnitude, m.norm),
                )
            ]
            for name, m in matrices.items()
        }
    return Adapters(low_rank, {})


def adapter(arch: str, lora: LoRA, matrices: Mapping[str, Matrices]) -> Lora:
    """The matrices as an adapter for models as they are loaded."""
    ctx = Context()

    def scaled(m: Matrices) -> Tensor:
        if m.origin.scale is None:
            return m.b
        return ctx.from_numpy(np.asarray(m.b.numpy() * m.origin.scale, np.float32), name=m.b.name)

    return Lora(
        "a trained adapter",
        arch,
        {name: Pair(m.a, scaled(m), lora.factor, m.magnitude) for name, m in matrices.items()},
    )


def peft_pairs(lora: LoRA, matrices: Mapping[str, Matrices]) -> dict[str, Pair]:
    """The matrices as they belong to the weights of a checkpoint, by GGUF names."""
    return {name: Pair(m.a, m.b, lora.factor, m.magnitude) for name, m in matrices.items()}
