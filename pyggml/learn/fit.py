"""`gg.fit`: train the parameters of graphs of one's own on a data set (ggml_opt_fit)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pyggml import ops
from pyggml.buffers.buffer import check_free_memory
from pyggml.dtypes import DType
from pyggml.errors import BatchError, DTypeError, GraphError, OneSite, ShapeError, whole
from pyggml.graph import Graph
from pyggml.run_graph import eval as gg_eval
from pyggml.sched import Scheduler
from pyggml.tensor import FLAG_PARAM, Context, Tensor
from pyggml.types import Floats, Ints

from .dataset import Dataset, Order, steps_of
from .gradients import grad
from .loop import Callback, Epoch, Measured, Options, Samples, checked, named, run
from .optimisers import Optimiser, above_0, check_optimiser, new_states, new_step
from .state_file import Trained, read_state, write_state
from .step_graph import check_graph_memory, finite, in_order, run_checked, with_steps

_TRAINED = (DType.F32, DType.F16, DType.BF16)
_NOTHING: Mapping[Tensor, Any] = {}
LossOf = Callable[..., "Tensor | tuple[Tensor, Mapping[str, Tensor]]"]


def fit(
    loss_of: LossOf,
    dataset: Dataset,
    opt: Optimiser,
    epochs: float = 1,
    val_split: float = 0.0,
    n_batch: int = 32,
    n_ubatch: int | None = None,
    *,
    clip: float | None = None,
    seed: int = 0,
    n_threads: int | None = None,
    callback: Callback | None = None,
    progress: bool = False,
    state: str | os.PathLike[str] | None = None,
    save_every: int = 0,
    resume: str | os.PathLike[str] | None = None,
) -> list[Epoch]:
    """Train parameters, the leafs marked with `set_param`, on the examples of a data set, and give the results of each
    epoch: the mean loss and metrics, with their uncertainties. Parameters are F32, F16 or BF16. Those of 16 bits have
    copies in F32, which the steps change, so that small steps add up; the parameters are the copies, rounded.

    loss_of    records the loss of a batch, which is one element: the mean over the examples. It is called with a tensor
               for each field of the data, in its order, or by its name when the fields have names. Their last
               dimension counts the examples. It may give (loss, {"name": metric}): a metric is of numbers whose mean
               counts, one for the batch or one for each example. It is called once for each size of a batch
    dataset    the data
    opt        the optimiser
    epochs     how often all examples are seen
    val_split  the part of the examples that is held back, to measure loss and metrics on after each epoch
    n_batch    examples of a step (the logical batch)
    n_ubatch   examples that are computed at a time (the physical batch), at most n_batch, the default: gradients add up
               over the parts of a batch, which takes less memory
    clip       gradients whose common norm is larger are made smaller, to this norm; None: never
    seed       of the order of examples
    n_threads  as of `gg.compute`
    callback   called after each step with a `Progress`
    progress   show a bar on stderr, when that is a terminal
    state      a file to save in: every `save_every` steps (0: after each epoch), and in the end, also when the training
               is interrupted
    resume     a saved state to go on from, to the same bits; the results have its epochs, too

    Results do not depend on the number of threads. Raises GraphError for a loss without parameters and for one that is
    no number (the parameters stay as they were before that step); ShapeError and DTypeError for a loss and parameters
    of other shapes and types than told; BatchError for bad numbers; StateError for the state of another training;
    AllocError when memory is too small. Source: ggml_opt_fit.
    """
    if not isinstance(dataset, Dataset):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BatchError(f"fit: dataset must be a gg.Dataset, not {type(dataset).__name__}")
    check_optimiser(opt, GraphError)
    n_batch = whole("fit: n_batch", n_batch, 1, error=BatchError)
    n_ubatch = n_batch if n_ubatch is None else whole("fit: n_ubatch", n_ubatch, 1, n_batch, error=BatchError)
    if clip is not None:
        above_0("fit: clip", clip)
    how = checked(Options(callback, progress, state, save_every, resume))
    seed = whole("fit: seed", seed, 0, error=BatchError)
    order = Order(len(dataset), n_batch, seed, val_split, dataset.shard)
    n_steps = steps_of(epochs, order.n_epoch)
    if state is not None or resume is not None:
        about = {"data": dataset.digest(), "shard": dataset.shard, "n_batch": n_batch, "n_ubatch": n_ubatch}
        about |= {"val_split": val_split, "seed": seed, "clip": clip, "optimiser": named(opt)}
        how = how._replace(about=about)
    learner = _Graphs(loss_of, dataset, opt, n_ubatch, n_ubatch < n_batch, clip, n_threads)
    return run(learner, order, order.held, n_steps, how)


class _Recorded:
    """The loss and the metrics of a batch of one size, and the inputs."""

    def __init__(self, loss_of: LossOf, dataset: Dataset, n: int) -> None:
        self.ctx = Context()
        self.inputs = dataset.tensors(self.ctx, n)
        with self.ctx:
            if dataset.names is None:
                result = loss_of(*self.inputs)
            else:
                result = loss_of(**dict(zip(dataset.names, self.inputs, strict=True)))
        loss, metrics = result if isinstance(result, tuple) else (result, dict[str, Tensor]())
        if not isinstance(loss, Tensor) or not isinstance(metrics, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GraphError('fit: loss_of must give a Tensor, or a tuple (loss, {"name": metric})')
        for name, t in metrics.items():
            if not isinstance(t, Tensor) or t.dtype.is_quantized or name == "loss":  # pyright: ignore[reportUnnecessaryIsInstance]
                raise GraphError(f'fit: the metric {name!r:.40} must be a Tensor of numbers, and not be called "loss"')
        if loss.dtype is not DType.F32 or loss.n_elements != 1 or loss.op == "none":
            raise ShapeError(f"fit: the loss must be one element in F32 that ops have computed, not {loss.describe()}")
        self.loss, self.metrics = loss.set_output(), {name: t.set_output() for name, t in metrics.items()}
        self.graph = Graph().build_forward_expand(loss)
        for t in self.metrics.values():
            self.graph.build_forward_expand(t)
        self.params = [t for t in self.graph.leafs if t.flags & FLAG_PARAM]
        self.n = n

    def measured(self) -> Measured:
        """The loss and the metrics of the last run."""
        found = {"loss": [Samples(self.loss.numpy().copy(), float(self.n))]}
        for name, t in self.metrics.items():
            found[name] = [Samples(np.asarray(t.numpy(), np.float64), self.n / t.n_elements)]
        return found


class _Graphs:
    """Own graphs as the loop trains them.

    A batch that is computed at once is one graph: loss, gradients, steps. When batches are computed in parts, a graph
    adds the gradients of a part to those before it, and another one makes the step.
    """

    unit = "examples"

    def __init__(
        self,
        loss_of: LossOf,
        dataset: Dataset,
        opt: Optimiser,
        n_ubatch: int,
        accumulates: bool,
        clip: float | None,
        n_threads: int | None,
    ) -> None:
        self.n_steps = 0
        self._loss_of, self._data, self._opt = loss_of, dataset, opt
        self._n_ubatch, self._accumulates, self._clip = n_ubatch, accumulates, clip
        self._scheduler = Scheduler(("cpu",), n_threads)
        self._ctx = Context()
        self._recorded: dict[int, _Recorded] = {}
        self._learning: dict[int, Graph] = {}
        self._params = self._record(min(n_ubatch, len(dataset))).params
        if not self._params:
            raise GraphError("fit: the loss depends on no parameter; mark them with set_param()")
        for w in self._params:
            if w.dtype not in _TRAINED:
                raise DTypeError(f"fit: parameters must be F32, F16 or BF16, not {w.describe()}")
        self._check_memory()
        self._n_bytes = 0  # of the memory of graphs
        # What steps change, of each parameter: itself, or its copy in F32.
        self._masters = {w: w if w.dtype is DType.F32 else self._copy(w) for w in self._params}
        self._numbers = self._ctx.new_tensor(DType.F32, (opt.n_numbers,), "opt_numbers").set_input()
        self._states = {w: new_states(self._ctx, opt, master) for w, master in self._masters.items()}
        self._share = self._ctx.new_tensor(DType.F32, (1,), "share of the part").set_input()
        self._sums = {w: self._zeros(w) for w in self._params} if accumulates else {}
        if accumulates:
            with self._ctx, OneSite():
                self._step = with_steps(self._ctx, (), self._sums, self._stepped, clip)

    # -- see `Learner` ------------------------------------------------------------------------------------------------

    def numbers(self, step: int) -> Floats:
        return self._opt.numbers(step)

    def learn(self, batch: Ints) -> Measured:
        self._numbers.set(self.numbers(self.n_steps))
        parts = self._parts(batch)
        for total in self._sums.values():
            total.numpy()[...] = 0
        measured: dict[str, list[Samples]] = {}
        for part in parts:
            self._share.set([len(part) / len(batch)])
            for name, samples in self._run(part, learns=True).items():
                measured.setdefault(name, []).extend(samples)
        if self._accumulates:
            self._checked_run(self._step)
        self.n_steps += 1
        return measured

    def measure(self, batch: Ints) -> Measured:
        measured: dict[str, list[Samples]] = {}
        for part in self._parts(batch):
            for name, samples in self._run(part, learns=False).items():
                measured.setdefault(name, []).extend(samples)
        return measured

    def n_read(self, batch: Ints) -> int:
        return len(batch)

    def write(self, path: str | os.PathLike[str], more: Mapping[str, str]) -> None:
        write_state(os.fspath(path), self._trained, self.n_steps, more)

    def read(self, path: str | os.PathLike[str], check: Callable[[Mapping[str, Any]], None]) -> None:
        self.n_steps = read_state(path, self._trained, check)
        for w, master in self._masters.items():
            if w is not master:
                w.set(gg_eval(ops.cast(master, w.dtype)))

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _trained(self) -> Trained:
        names = {w: f"{i}.{w.name}"[:40] for i, w in enumerate(self._params)}
        states = {names[w]: s for w, s in self._states.items()}
        masters = {names[w]: master for w, master in self._masters.items()}
        return Trained(masters, states, {"pyggml.training.optimiser": type(self._opt).__name__})

    def _copy(self, w: Tensor) -> Tensor:
        return self._ctx.from_numpy(np.asarray(w.numpy(), np.float32), name=w.name)

    def _check_memory(self) -> None:
        """Raises AllocError when there is no room for what is kept beside the parameters."""
        n = sum(w.n_elements for w in self._params)
        kept = sum(4 * w.n_elements for w in self._params if w.dtype is not DType.F32)
        kept += 4 * n if self._accumulates else 0
        with Context() as ctx:
            like = [ctx.new_tensor(DType.F32, w.ne, w.name) for w in self._params]
            kept += sum(s.nbytes for w in like for s in self._opt.states(w))
        check_free_memory(kept, f"fit: training of {n:,} numbers")

    def _checked_run(self, graph: Graph, inputs: Mapping[Tensor, Any] = _NOTHING) -> None:
        """Run a graph with these inputs. Raises AllocError when there is no room for its values, and as
        `run_checked`."""
        schedule = self._scheduler.alloc(graph)
        self._n_bytes = check_graph_memory(self._scheduler, self._n_bytes, graph)
        for t, values in inputs.items():
            t.set(values)
        run_checked(schedule, self.n_steps)

    def _zeros(self, like: Tensor) -> Tensor:
        return self._ctx.from_numpy(np.zeros(like.shape, np.float32))

    def _parts(self, batch: Ints) -> Sequence[Ints]:
        return [batch[i : i + self._n_ubatch] for i in range(0, len(batch), self._n_ubatch)]

    def _record(self, n: int) -> _Recorded:
        if n not in self._recorded:
            new = _Recorded(self._loss_of, self._data, n)
            if self._recorded and {*new.params} != {*self._params}:
                text = "make them before, not in loss_of, which is called once for each size of a batch"
                raise GraphError(f"fit: the loss of a batch of {n} examples depends on other parameters: {text}")
            self._recorded[n] = new
        return self._recorded[n]

    def _run(self, part: Ints, learns: bool) -> Measured:
        recorded = self._record(len(part))
        graph = self._learns(recorded) if learns else recorded.graph
        with self._scheduler.lock:
            self._checked_run(graph, dict(zip(recorded.inputs, self._data[part], strict=True)))
            return recorded.measured()

    def _learns(self, r: _Recorded) -> Graph:
        """The graph that learns from a part."""
        if r.n not in self._learning:
            with r.ctx, OneSite():
                first = (r.loss, finite("the loss", r.loss), *r.metrics.values())
                seed = self._share.reshape(r.loss.shape) if self._accumulates else None
                gradients = dict(zip(self._params, grad(r.loss, self._params, seed), strict=True))
                if self._accumulates:
                    found = in_order(first, gradients, lambda w, g: ops.add_inplace(self._sums[w], g))
                else:
                    found = with_steps(r.ctx, first, gradients, self._stepped, self._clip)
            self._learning[r.n] = found
        return self._learning[r.n]

    def _stepped(self, w: Tensor, g: Tensor) -> Tensor:
        master = self._masters[w]
        stepped = new_step(self._opt, master, g, self._states[w], self._numbers)
        return stepped if master is w else ops.cpy(stepped, w)
