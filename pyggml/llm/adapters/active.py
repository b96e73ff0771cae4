"""The adapters of one context: the tensors that its graphs are built with, and the scales that the graphs read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, cast
from weakref import WeakValueDictionary

from pyggml import ops
from pyggml.dtypes import DType
from pyggml.errors import ModelError, OneSite
from pyggml.graph import Graph
from pyggml.models.blocks import NO_ADAPTERS, Adapters, LowRank
from pyggml.models.hparams import HParams
from pyggml.models.weights import Weights
from pyggml.run_graph import compute
from pyggml.tensor import Context, Tensor, allocate_tensors

from .control import ControlVector, Directions, control_vector
from .dora import norms, row_squares
from .lora import MAX_SCALE, TOKEN_EMBD, Adaptable, Lora, Pair

Scaled = tuple[Lora, float]


class ActiveAdapters:
    """The LoRA adapters of a context with their scales, and its control vector.

    Graphs are built anew when the set of adapters changes, or the layers of the control vector; not for other scales or
    other numbers in the vector. Earlier sets are kept as long as their graphs. `reserve` is called before graphs are
    built with a new set; when it raises, nothing has changed.
    """

    def __init__(self, model: Adaptable, hp: HParams, buft: str, reserve: Callable[[Adapters], None]) -> None:
        self._model, self._hp, self._buft, self._reserve = model, hp, buft, reserve
        self._known: WeakValueDictionary[tuple[tuple[int, ...], tuple[int, ...]], _Set] = WeakValueDictionary()
        self._control: dict[int, Tensor] = {}  # for every layer that ever had a direction
        self._set = _Set((), {}, buft, model.weights)
        self.loras: tuple[Scaled, ...] = ()
        self.control = ControlVector({})

    @property
    def graph(self) -> Adapters:
        """The adapters that the graphs of the next decode are built with."""
        return self._set if self._set.low_rank or self._set.control else NO_ADAPTERS

    def set_loras(self, loras: Iterable[Scaled]) -> None:
        """Set all adapters, in order. Adapters of scale 0 take no time. Raises ModelError for an adapter that does not
        fit the model or occurs twice, and for a scale that is not a finite number."""
        scaled: list[Scaled] = []
        for lora, scale in checked(loras):
            lora.check(self._model)
            if any(lora is other for other, _ in scaled):
                raise ModelError(f"the adapter {lora.path} is given twice")
            scaled.append((lora, scale))
        self._change([lora for lora, scale in scaled if scale], self.control)
        self._set.scale([scale for _, scale in scaled if scale])
        self.loras = tuple(scaled)

    def set_control(self, directions: Directions | None, scale: float, il_start: int, il_end: int | None) -> None:
        """Set the control vector, see `control_vector`. Raises ModelError when it does not fit the model."""
        vector = control_vector(directions, scale, il_start, il_end)
        n_embd, n_layer = self._hp.n_embd, self._hp.n_layer
        if vector.directions and vector.n_embd != n_embd:
            raise ModelError(f"the control vector's directions have {vector.n_embd} numbers, but n_embd is {n_embd}")
        last = max(vector.directions, default=0)
        if last >= n_layer:
            raise ModelError(f"the control vector has a direction.{last}; the last layer of the model is {n_layer - 1}")
        new = [il for il in vector.directions if il not in self._control]
        ctx = Context()
        tensors = {il: ctx.new_tensor(DType.F32, (n_embd,), f"direction.{il}") for il in new}
        allocate_tensors(tensors.values(), self._buft)
        self._control |= tensors
        self._change(self._set.loras, vector)
        for il, direction in vector.directions.items():
            self._control[il].set(direction)
        self.control = vector

    def _change(self, loras: Sequence[Lora], control: ControlVector) -> None:
        key = tuple(map(id, loras)), tuple(control.directions)
        found = self._known.get(key)
        if found is None:
            found = _Set(loras, {il: self._control[il] for il in control.directions}, self._buft, self._model.weights)
            if found.low_rank or found.control:
                self._reserve(found)
            self._known[key] = found
        self._set = found


class _Set(Adapters):
    """A set of adapters, and the scales that graphs built with it read."""

    def __init__(self, loras: Sequence[Lora], control: dict[int, Tensor], buft: str, weights: Weights) -> None:
        ctx = Context()
        scales: dict[tuple[int, float], Tensor] = {}  # by adapter and the factor of its pairs
        low_rank: dict[str, list[LowRank]] = {}
        doras: list[tuple[str, Pair, Tensor, Tensor]] = []
        for i, lora in enumerate(loras):
            for name, pair in lora.pairs.items():
                key = (i, pair.factor)
                if key not in scales:
                    scales[key] = ctx.new_tensor(DType.F32, (1,), f"lora_scale.{i}")
                gain = None
                if pair.magnitude is not None:
                    gain = ctx.new_tensor(DType.F32, pair.magnitude.ne[: pair.magnitude.rank], f"{name} (gain)")
                    doras.append((name, pair, scales[key], gain))
                low_rank.setdefault(name, []).append(LowRank(pair.a, pair.b, scales[key], gain))
        allocate_tensors([*scales.values(), *(gain for _, _, _, gain in doras)], buft)
        self._gains = [_gain_of(ctx, weights, *dora) for dora in doras]
        super().__init__(low_rank, control)
        self.loras, self._scales = tuple(loras), scales

    def scale(self, scales: Sequence[float]) -> None:
        """Set the scale of each adapter, from the next run on."""
        for (i, factor), t in self._scales.items():
            t.set([scales[i] * factor])
        for graph in self._gains:
            compute(graph)


def _gain_of(ctx: Context, weights: Weights, name: str, pair: Pair, scale: Tensor, gain: Tensor) -> Graph:
    """The graph that computes the gain of a DoRA adapter's weight, for the scale as it is."""
    assert pair.magnitude is not None, name
    weight = weights[name if name in weights else TOKEN_EMBD]  # the embeddings are the output, too
    with ctx, OneSite():
        squares = ctx.from_numpy(row_squares(weight))
        norm = norms(weight, squares, pair.a, pair.b, scale)
        return Graph().build_forward_expand(ops.cpy(ops.div(pair.magnitude, norm), gain))


def checked(loras: Iterable[Scaled]) -> list[Scaled]:
    """Adapters and their scales. Raises ModelError for anything else."""
    if isinstance(loras, Lora) or not isinstance(loras, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ModelError(f"adapters are given as a list of (adapter of Model.load_lora, scale), not {loras!r:.80}")
    return [_scaled(item) for item in loras]


def _scaled(item: Any) -> Scaled:
    try:
        lora, scale = item
    except (TypeError, ValueError):
        lora, scale = item, 1.0
    if not isinstance(lora, Lora):
        raise ModelError(f"adapters are given as (adapter of Model.load_lora, scale), not {item!r:.80}")
    if not isinstance(scale, Real) or not abs(cast("float", scale)) <= MAX_SCALE:
        what = f"the scale of the adapter {lora.path}"
        raise ModelError(f"{what} must be a number from -{MAX_SCALE:g} to {MAX_SCALE:g}, not {scale!r:.40}")
    return lora, float(scale)
