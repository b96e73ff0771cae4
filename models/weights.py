"""The tensors of a model. They note which tensors the builder asks for: those that a file must have, and those that it
may have. A tensor that nobody asked for can then be reported."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.tensor import Context, Tensor, full_ne


class TensorSpec(NamedTuple):
    """A tensor that a builder asks for: its GGUF name, its ne, and whether a file may lack it."""

    name: str
    ne: tuple[int, ...]
    optional: bool = False


class Weights(Mapping[str, Tensor]):
    """The tensors that a builder asked for and that exist, by name.

    asked    everything that was asked for, whether it exists or not, in the builder's order
    unused   the names of tensors that exist and that nobody asked for
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.asked: dict[str, TensorSpec] = {}

    def ask(self, spec: TensorSpec) -> Tensor | None:
        """The tensor, or None for an optional one that is absent.

        Raises ModelError naming the tensor that is missing or has another shape.
        """
        known = self.asked.setdefault(spec.name, spec)
        if known.optional and not spec.optional:
            self.asked[spec.name] = spec
        t = self._tensors.get(spec.name)
        if t is None:
            if not spec.optional:
                raise ModelError(f"the model has no tensor {spec.name} (expected ne {list(spec.ne)})")
        elif t.ne != full_ne(spec.ne):
            raise ModelError(
                f"the tensor {spec.name} has ne {list(t.ne)}, but the hyperparameters ask for {list(full_ne(spec.ne))}"
            )
        return t

    def ne(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, asked for or not. None when there is no tensor of that name."""
        t = self._tensors.get(name)
        return None if t is None else t.ne

    @property
    def unused(self) -> list[str]:
        """Names in the order of the file."""
        return [name for name in self._tensors if name not in self.asked]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.asked:
            raise KeyError(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.asked if name in self._tensors)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class CheckedWeights(Weights):
    """Weights that go on when a tensor is wrong, so that everything wrong is found. `faults` has the errors, by the
    name of the tensor."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.faults: dict[str, str] = {}
        self._made = ShapeOnlyWeights()

    def ask(self, spec: TensorSpec) -> Tensor | None:
        """The tensor that is asked for. For a wrong tensor, another one of the right shape; for an optional tensor that
        is absent, None."""
        try:
            return super().ask(spec)
        except ModelError as e:
            self.faults.setdefault(spec.name, str(e))
            return self._made.ask(spec._replace(optional=False))


class ShapeOnlyWeights(Weights):
    """Weights without memory, made as they are asked for, to look at a graph without a file.

    Matrices are F16, vectors and biases F32. Tensors that a file may lack exist when `optional` has their names.
    """

    def __init__(self, optional: Container[str] = ("output.weight",)) -> None:
        self._made: dict[str, Tensor] = {}
        self._ctx, self._optional = Context(), optional
        super().__init__(self._made)

    def ask(self, spec: TensorSpec) -> Tensor | None:
        """The tensor, made when it is asked for, or None."""
        if spec.name not in self._made and (not spec.optional or spec.name in self._optional):
            dtype = DType.F16 if len(spec.ne) > 1 and not spec.name.endswith(".bias") else DType.F32
            self._made[spec.name] = self._ctx.new_tensor(dtype, spec.ne, spec.name)
        return super().ask(spec)
