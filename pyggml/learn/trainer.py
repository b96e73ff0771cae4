"""`Trainer`: train the weights of a model, or adapters, on sequences of tokens.

The forward pass, the backward pass and the steps of the optimiser are one graph, built once for each shape of a batch
and run again. Parameters, and what the optimiser remembers of them, are leafs that all these graphs share and write.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import numpy as np

from pyggml import ops
from pyggml.buffers.buffer import check_free_memory
from pyggml.codec import Array
from pyggml.dtypes import DType
from pyggml.errors import BatchError, ModelError, OneSite, whole
from pyggml.graph import Graph
from pyggml.hf.folder import HFFolder, is_folder, open_hf_folder
from pyggml.llm.batch import token_ids
from pyggml.models.blocks import NO_ADAPTERS
from pyggml.models.weights import Weights
from pyggml.run_graph import eval as gg_eval
from pyggml.sched import Scheduler
from pyggml.stream.sizes import memory_size, shown_size
from pyggml.tensor import FLAG_OUTPUT, Context, Tensor, allocate_tensors
from pyggml.types import Floats, Ints

from . import saved
from .checkpoint import numbers_of, origin_of
from .dropout import Dropout
from .fit_texts import fit_texts
from .gradients import gradients_of
from .head import head_of, part_size, record_loss
from .loop import Callback, Epoch, Options, checked
from .lora import LoRA, Matrices, adapter, adapters_of, new_adapters, targets_of
from .optimisers import Optimiser, above_0, check_optimiser, new_states, new_step
from .recompute import layers_to_compute_again
from .step_graph import check_graph_memory, finite, in_order, run_checked, with_steps
from .texts import BUFT, Shape, TextGraph
from .texts_file import Masks, Texts

if TYPE_CHECKING:
    from pyggml.llm.adapters.lora import Lora
    from pyggml.llm.loaded import LoadedModel

_BLOCK = 32  # texts are filled up to a multiple of it, so that few shapes occur
_MAX_GRAPHS = 8  # graphs kept for reuse
_NOT_COUNTED = -1  # the label of a row whose prediction does not count


# What a graph does beside the loss: nothing, a step of the optimiser, or add its gradients to sums.
_Kind = Literal["loss", "step", "sum"]


class _Part(NamedTuple):
    """Texts as a graph takes them.

    number   of the part in the batch, from 0 on
    texts    the tokens that are read: of each text all but the last
    encoded  of encoder-decoders, the tokens that are encoded for each text
    labels   of each token the next one, or _NOT_COUNTED: int32 [n_seqs * n_tokens]
    share    of the predictions of the batch that count, how many of them are of this part, 0 to 1
    """

    number: int
    shape: Shape
    texts: list[Ints]
    encoded: list[Ints]
    labels: Ints
    share: float


def _n_counted(labels: Ints) -> int:
    return int((labels != _NOT_COUNTED).sum())


class Trainer:
    """Trains a model; made by `Model.trainer`.

    model   the model, which keeps its weights: what is trained are copies of them, or adapters
    opt     the optimiser
    params  what is trained, by name: leafs, F32. Of weights by GGUF name; of adapters NAME.lora_a, NAME.lora_b, and
            with DoRA NAME.lora_magnitude. For a model of a Hugging Face folder they are what the checkpoint has
            (logarithms where the GGUF has values)
    states  what the optimiser remembers of each parameter, in the order of `opt.states(parameter)`
    matrices  of adapters, A and B by the name of the weight
    numbers what the optimiser reads in each step
    n_steps how many steps were made
    dropout, seed  see `Model.trainer`

    Results do not depend on the number of threads. A trainer is for one thread of a program at a time.
    """

    def __init__(
        self,
        model: LoadedModel,
        opt: Optimiser,
        train: Literal["all"] | LoRA = "all",
        n_ctx: int = 512,
        n_threads: int | None = None,
        n_ubatch: int | None = None,
        clip: float | None = None,
        checkpoint: bool = False,
        ram: int | str | None = None,
        dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        """See `Model.trainer`."""
        if model.vocab_only or model.weight_stream is not None or model.stage is not None:
            raise ModelError("training needs the whole model in memory: load it without vocab_only, ram or layers")
        if not model.architecture.logits:
            raise ModelError(f"{model.arch} has no logits: training is for models that predict tokens")
        if train != "all" and not isinstance(train, LoRA):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(f'train must be "all" or a LoRA, not {train!r:.60}')
        check_optimiser(opt, ModelError)
        if model.repacking is not None:
            model.repacking.finish()
        self.model, self.opt = model, opt
        self.train: Literal["all"] | LoRA = train
        self.n_ctx = whole("n_ctx", n_ctx, 2, error=ModelError)
        self.n_ubatch = n_ubatch if n_ubatch is None else whole("n_ubatch", n_ubatch, 1, error=ModelError)
        self.clip = clip if clip is None else above_0("clip", clip)
        if not isinstance(checkpoint, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ModelError(f"checkpoint must be True or False, not {checkpoint!r:.40}")
        self.checkpoint, self.ram = checkpoint, None if ram is None else memory_size(ram)
        if isinstance(dropout, bool) or not isinstance(dropout, Real) or not 0 <= dropout < 1:
            raise ModelError(f"dropout must be a number from 0 on and below 1, not {dropout!r:.40}")
        self.dropout, self.seed = float(dropout), whole("seed", seed, 0, error=ModelError)
        self.n_steps = 0
        self._ctx = Context()
        self._folder = open_hf_folder(model.path) if is_folder(model.path) else None
        self._weights = _TrainedWeights(model, self._folder) if train == "all" else None
        targets = targets_of(model, train) if isinstance(train, LoRA) else []
        self._check_memory(targets)
        if self._weights is not None:
            self.params = self._weights.new_parameters(self._ctx)
            self.matrices: dict[str, Matrices] = {}
        else:
            assert isinstance(train, LoRA)
            self.matrices = new_adapters(self._ctx, model, train, targets, self._folder)
            self.params = {t.name: t for m in self.matrices.values() for t in m.trained}
        self.states: dict[str, tuple[Tensor, ...]] = {
            name: new_states(self._ctx, opt, t) for name, t in self.params.items()
        }
        self.numbers = self._ctx.new_tensor(DType.F32, (opt.n_numbers,), "opt_numbers").set_input()
        self.numbers.set(np.zeros(opt.n_numbers, np.float32))
        self._scheduler = Scheduler(("cpu",), n_threads)
        self._scheduler.watches = model.watches
        self._graphs: dict[tuple[Shape, _Kind], _StepGraph] = {}
        self._n_bytes = 0  # of the memory of graphs
        self._sums: dict[Tensor, Tensor] = {}
        self._steps_of_sums: Graph | None = None

    def __repr__(self) -> str:
        n = sum(t.n_elements for t in self.params.values())
        return f"<Trainer {self.model.arch} {len(self.params)} parameters of {n} elements, {self.n_steps} steps>"

    @property
    def scheduler(self) -> Scheduler:
        """What runs the graphs: `Profile(trainer.scheduler)` measures them."""
        return self._scheduler

    def step(self, sequences: Texts, masks: Masks | None = None, encoded: Texts | None = None) -> float:
        """Make one step: the parameters follow the gradients of the mean loss of a batch.

        sequences  token ids of each text, at least two and at most n_ctx. Texts do not see each other
        masks      for each text a value for each token: 0 or False when its prediction does not count. (The first token
                   is not predicted; its value is ignored.)
        encoded    of encoder-decoders, for each text the token ids that are encoded for it, at least one and at most
                   n_ctx. The text begins with the token `model.decoder_start` then

        With `n_ubatch` no more texts are in memory at a time; the gradients of a larger batch are summed up.

        Result: the mean cross-entropy (natural logarithms) over all predictions that count, before the update.

        Raises BatchError for sequences that cannot be taken; GraphError when the loss, or with `clip` the norm of the
        gradients, is no finite number, which names the step and the first tensor with such an element (the parameters
        stay as they were).
        """
        parts = self._parts(sequences, masks, encoded)
        self._measure_rows()
        self.numbers.set(self.opt.numbers(self.n_steps))
        if len(parts) == 1:
            loss = self._run(parts[0], "step")
        else:
            for total in self._sums.values():
                total.numpy()[...] = 0
            loss = sum(part.share * self._run(part, "sum") for part in parts)
            if self._steps_of_sums is None:
                with Context() as ctx, OneSite():
                    self._steps_of_sums = with_steps(ctx, (), self._sums, self.step_of, self.clip)
            self._checked_run(self._steps_of_sums, lambda: None)
        self.n_steps += 1
        return loss

    def loss(self, sequences: Texts, masks: Masks | None = None, encoded: Texts | None = None) -> float:
        """The mean loss of a batch, as `step` returns it. Nothing is changed. Raises as `step`."""
        parts = self._parts(sequences, masks, encoded)
        self._measure_rows()
        return sum(part.share * self._run(part, "loss") for part in parts)

    def fit(
        self,
        sequences: Texts,
        masks: Masks | None = None,
        epochs: float = 1,
        val_split: float = 0.0,
        n_batch: int = 4,
        *,
        encoded: Texts | None = None,
        seed: int = 0,
        n_steps: int | None = None,
        callback: Callback | None = None,
        progress: bool = False,
        state: str | os.PathLike[str] | None = None,
        save_every: int = 0,
        resume: str | os.PathLike[str] | None = None,
    ) -> list[Epoch]:
        """Make steps over all texts, and give the results of each epoch.

        sequences  the texts, see `step`
        masks      of each text, see `step`
        epochs     how often all texts are seen; steps that were made before count
        val_split  the part of the texts that is held back, to measure the loss on after each epoch
        n_batch    texts of a step. Those of a step have similar lengths
        encoded    of encoder-decoders, what is encoded for each text, see `step`
        seed       of the order of texts
        n_steps    how many steps there are in all, with those made before (instead of `epochs`)

        The other arguments are those of `gg.fit`: one loop serves both. Raises as `step` and `gg.fit`.
        """
        how = checked(Options(callback, progress, state, save_every, resume), self.model.path)
        texts, masks = self._texts(sequences, masks)  # before the first step, so that nothing is lost
        pairs = self._encoded(encoded, len(texts))
        return fit_texts(self, texts, masks, pairs or None, epochs, val_split, n_batch, seed, n_steps, how)

    def weight(self, name: str) -> Floats:
        """The values that a trained weight has now, as a GGUF holds it: float32, in NumPy order. Raises KeyError."""
        assert self._weights is not None, self
        return self._weights.values(name, self.params)

    @property
    def trained(self) -> Sequence[str]:
        """The names of the weights that change."""
        return tuple(self.matrices if self._weights is None else self._weights.origins)

    @property
    def lora(self) -> Lora:
        """The adapter that is trained, for `ctx.set_loras([(trainer.lora, 1.0)])`: it has the matrices themselves, and
        changes with each step. (With DoRA, a context takes the lengths of rows as they are when the adapter is set.)
        Raises ModelError when weights are trained."""
        if not isinstance(self.train, LoRA):
            raise ModelError('there is no adapter: the trainer was made with train="all"')
        return adapter(self.model.arch, self.train, self.matrices)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what was trained; it appears when it is complete. An adapter becomes a GGUF file when `path` ends with
        .gguf, else a PEFT folder. A model becomes a GGUF file, its weights in the types that they had, or a Hugging
        Face folder. A folder must not exist yet.

        Raises GGUFError and ModelError as the writers do (`save_lora`, `save_lora_peft`, `write_quantized`,
        `export_folder`), and when a weight is not a finite number.
        """
        saved.save(self, path)

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write all that the next steps depend on: the parameters, what the optimiser remembers, and how many steps
        were made. A trainer made with the same arguments goes on from there to the same bits. Raises GGUFError."""
        saved.save_state(self, path, {})

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Go on from what `save_state` wrote. Raises GGUFError for a bad file, StateError for the state of another
        training; then nothing has changed."""
        saved.load_state(self, path, lambda metadata: None)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _texts(self, sequences: Texts, masks: Masks | None) -> tuple[list[Ints], list[Array] | None]:
        """Texts and masks as arrays. Raises BatchError for what `step` does not take."""
        if not isinstance(sequences, Sequence | np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BatchError(f"a batch is a list of texts, each a list of token ids, not {sequences!r:.40}")
        if not len(sequences):
            raise BatchError("a batch must have at least one sequence")
        if masks is not None and not isinstance(masks, Sequence | np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BatchError(f"masks are a list, one for each text, not {masks!r:.40}")
        if masks is not None and len(masks) != len(sequences):
            raise BatchError(f"{len(sequences)} sequences have {len(masks)} masks")
        texts = [_checked(ids, i, self.n_ctx, self.model.hparams.n_vocab) for i, ids in enumerate(sequences)]
        if masks is None:
            return texts, None
        arrays = [np.asarray(mask) for mask in masks]
        for i, (text, mask) in enumerate(zip(texts, arrays, strict=True)):
            if mask.shape != text.shape or mask.dtype.kind not in "biuf":
                raise BatchError(f"sequence {i} has {len(text)} tokens, its mask is of shape {mask.shape}")
        return texts, arrays

    def _encoded(self, encoded: Texts | None, n: int) -> list[Ints]:
        """What is encoded for each of `n` texts, as arrays; of models without an encoder nothing. Raises BatchError for
        what `step` does not take."""
        arch = self.model.arch
        if self.model.architecture.encode is None:
            if encoded is not None:
                raise BatchError(f"{arch} has no encoder: put what is encoded for a text before it, and mask it out")
            return []
        if not isinstance(encoded, Sequence | np.ndarray) or len(encoded) != n:
            have = "none" if encoded is None else f"{encoded!r:.40}"
            raise BatchError(
                f"{arch} is an encoder-decoder: `encoded` must have tokens for each of {n} texts, not {have}"
            )
        return [_checked(ids, i, self.n_ctx, self.model.hparams.n_vocab, 1) for i, ids in enumerate(encoded)]

    def _parts(self, sequences: Texts, masks: Masks | None, encoded: Texts | None) -> list[_Part]:
        """A batch, in parts of at most `n_ubatch` texts; those without a prediction that counts are left out. Raises
        BatchError."""
        texts, masks = self._texts(sequences, masks)
        pairs = self._encoded(encoded, len(texts))
        labels: list[Ints] = []
        for i, text in enumerate(texts):
            counted = np.ones(len(text), np.bool_)
            if masks is not None:
                counted = masks[i]
            labels.append(np.where(counted[1:] != 0, text[1:], _NOT_COUNTED).astype(np.int32))
        n_counted = sum(_n_counted(x) for x in labels)
        if n_counted == 0:
            raise BatchError("the masks leave no prediction of the batch")
        n = len(texts) if self.n_ubatch is None else self.n_ubatch
        parts = [
            self._part(i // n, texts[i : i + n], pairs[i : i + n], labels[i : i + n], n_counted)
            for i in range(0, len(texts), n)
        ]
        return [part for part in parts if part.share]

    def _part(self, number: int, texts: list[Ints], encoded: list[Ints], labels: list[Ints], n_counted: int) -> _Part:
        n_tokens = _filled(max(map(len, labels)), self.n_ctx - 1)
        n_encoded = _filled(max(map(len, encoded)), self.n_ctx) if encoded else 0
        filled = np.full((len(texts), n_tokens), _NOT_COUNTED, np.int32)
        for row, own in zip(filled, labels, strict=True):
            row[: len(own)] = own
        share = _n_counted(filled) / n_counted
        shape = Shape(len(texts), n_tokens, n_encoded)
        return _Part(number, shape, [text[:-1] for text in texts], encoded, filled.reshape(-1), share)

    def _measure_rows(self) -> None:
        """Compute the norms that DoRA divides rows by, of the parameters as they are."""
        for m in self.matrices.values():
            if m.measures is not None:
                self._scheduler.compute(m.measures)

    def _run(self, part: _Part, kind: _Kind) -> float:
        """Run the graph of a part; the result is its loss."""
        graph = self._graph(part.shape, kind)
        self._checked_run(graph.graph, lambda: graph.fill(part, self.seed, self.n_steps))
        return float(graph.loss.numpy().item())

    def _checked_run(self, graph: Graph, fill: Callable[[], None]) -> None:
        """Run a graph with what `fill` sets. Raises GraphError as `step`."""
        with self._scheduler.lock:
            schedule = self._scheduler.alloc(graph)
            self._n_bytes = check_graph_memory(self._scheduler, self._n_bytes, graph)
            fill()
            run_checked(schedule, self.n_steps)

    def _graph(self, shape: Shape, kind: _Kind) -> _StepGraph:
        found = self._graphs.pop((shape, kind), None) or self._new_graph(shape, kind)
        self._graphs[shape, kind] = found  # the last one used is the last one here
        if len(self._graphs) > _MAX_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return found

    def _new_graph(self, shape: Shape, kind: _Kind) -> _StepGraph:
        """The graph of a part of a batch. It computes as few layers again as its memory allows. Raises ModelError."""
        most = self.model.hparams.n_layer
        if kind == "loss" or self.ram is None:
            return _StepGraph(self, shape, kind, most if self.checkpoint else 0)
        least = most if self.checkpoint else 0
        graphs = {n: _StepGraph(self, shape, kind, n) for n in {least, most}}
        needed = self._bytes(graphs[most])
        if needed > self.ram:
            text = f"{shape.n_seqs} texts of {shape.n_tokens} tokens need {needed} ({shown_size(needed)}) at least"
            raise ModelError(f"ram: {self.ram} bytes are too few, {text}: take fewer at a time (n_ubatch)")
        if self._bytes(graphs[least]) <= self.ram:
            return graphs[least]
        while most - least > 1:
            n = (least + most) // 2
            graphs[n] = _StepGraph(self, shape, kind, n)
            least, most = (least, n) if self._bytes(graphs[n]) <= self.ram else (n, most)
        return graphs[most]

    def _bytes(self, graph: _StepGraph) -> int:
        """The memory of a graph, and of all that is kept from step to step."""
        _, plan = self._scheduler.plan(graph.graph)
        kept = {t.root for t in (*graph.graph.leafs, *self.params.values(), *self._sums.values())}
        kept.update(t for states in self.states.values() for t in states)
        return sum(t.nbytes for t in kept) + sum(plan.sizes.values())

    def _check_memory(self, targets: Sequence[str]) -> None:
        """Raises AllocError when there is no room for the parameters (of the adapters of `targets`, when these are
        trained) and for what the optimiser remembers of them."""
        nes: dict[str, tuple[int, ...]] = {}
        weights = self.model.weights
        if self._weights is not None:
            nes = {name: weights[name].ne for name in {*self._weights.leaders.values()}}
        else:
            assert isinstance(self.train, LoRA)
            for name in targets:
                n_in, n_out, *n = weights[name].ne
                nes |= {f"{name}.lora_a": (n_in, self.train.r, *n), f"{name}.lora_b": (self.train.r, n_out, *n)}
        n, ctx = sum(map(math.prod, nes.values())), Context()
        what = f"training of {n:,} numbers"
        check_free_memory(4 * n, what)
        kept = sum(s.nbytes for name, ne in nes.items() for s in self.opt.states(ctx.new_tensor(DType.F32, ne, name)))
        check_free_memory(4 * n + kept, what)

    def sum_of(self, w: Tensor) -> Tensor:
        """What the gradients of a parameter are added to, over the parts of a batch."""
        if w not in self._sums:
            self._sums[w] = self._ctx.from_numpy(np.zeros(w.shape, np.float32), name=f"{w.name} (sum of gradients)")
        return self._sums[w]

    def step_of(self, w: Tensor, g: Tensor) -> Tensor:
        """Record the step of a parameter, see `Optimiser`."""
        return new_step(self.opt, w, g, self.states[w.name], self.numbers)

    def text_graph(self, shape: Shape, dropout: float = 0.0) -> TextGraph:
        """The forward pass of a batch, with what is trained. With `dropout` its adapters are a `Dropout`."""
        model, ctx = self.model, Context()
        weights, adapters = model.weights, NO_ADAPTERS
        with OneSite():
            if self._weights is not None:
                weights = self._weights.recorded(ctx, self.params)
            else:
                assert isinstance(self.train, LoRA)
                adapters = adapters_of(ctx, self.train, self.matrices)
            if dropout:
                adapters = Dropout(adapters, dropout)
            return TextGraph(model.architecture, model.hparams, weights, shape, adapters, flash_attn=True)


class _TrainedWeights:
    """The weights that are trained, and the parameters that they follow from.

    origins   by weight
    leaders   by weight, the weight that its parameter is named after: the first of those that follow from it
    numbers   numbers of the metadata that are trained as tensors, by the tensor's name
    """

    def __init__(self, model: LoadedModel, folder: HFFolder | None) -> None:
        """Raises ModelError when a weight is of a block type."""
        weights = model.weights
        blocks = [t.describe() for t in weights.values() if t.dtype.is_quantized]
        if blocks:
            text = "only adapters (LoRA) can be trained beside them, or load the model in F32, F16 or BF16"
            raise ModelError(f"{len(blocks)} weights are of block types, such as {blocks[0]}: {text}")
        self._weights, self.numbers = weights, numbers_of(model.kv)
        found = {name: origin_of(folder, name) for name, t in weights.items() if t.dtype.is_float}
        self.origins = {name: origin for name, origin in found.items() if origin is not None}
        first: dict[Hashable, str] = {}
        self.leaders = {name: first.setdefault(origin.key, name) for name, origin in self.origins.items()}

    def new_parameters(self, ctx: Context) -> dict[str, Tensor]:
        """The parameters, by name, with the values that the model has."""
        found: dict[str, Tensor] = {}
        for name, leader in self.leaders.items():
            if name == leader:
                t = self._weights[name]
                values = self.origins[name].parameter(np.asarray(t.numpy(), np.float32))
                found[name] = ctx.from_numpy(np.ascontiguousarray(values, np.float32), name=name).set_param()
                if t.buffer is not None:
                    t.buffer.give_back(t.offset, t.nbytes)  # graphs read the parameter in its place
        return found | {name: ctx.from_numpy(x, name=name).set_param() for name, x in self.numbers.items()}

    def recorded(self, ctx: Context, params: Mapping[str, Tensor]) -> Weights:
        """The model's weights, the trained ones as they follow from the parameters, recorded in `ctx`."""
        with ctx:
            new = {name: origin.weight(ctx, params[self.leaders[name]]) for name, origin in self.origins.items()}
        for name, t in new.items():
            if t.op != "none":
                t.set_name(name)
        return Weights({**self._weights, **new, **{name: params[name] for name in self.numbers}})

    def values(self, name: str, params: Mapping[str, Tensor]) -> Floats:
        """See `Trainer.weight`."""
        t = self.origins[name].weight(Context(), params[self.leaders[name]])
        return cast("Floats", t.numpy() if t.op == "none" else gg_eval(t))


def _filled(longest: int, most: int) -> int:
    """The tokens that texts are filled up to."""
    return min(-(-longest // _BLOCK) * _BLOCK, max(most, longest))


def _checked(ids: Sequence[int] | Ints, i: int, n_ctx: int, n_vocab: int, least: int = 2) -> Ints:
    """The token ids of sequence `i`, `least` at least. Raises BatchError."""
    if not isinstance(ids, Sequence | np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BatchError(f"a batch is a list of texts, each a list of token ids; sequence {i} is {ids!r:.40}")
    if not len(ids):
        raise BatchError(f"sequence {i} is empty")
    text = token_ids(cast("Sequence[int]", ids))
    if len(text) < least:
        raise BatchError(f"sequence {i} has one token: there is none to predict")
    if len(text) > n_ctx:
        raise BatchError(f"sequence {i} has {len(text)} tokens, more than the n_ctx = {n_ctx} of the trainer")
    outside = text[(text < 0) | (text >= n_vocab)]
    if len(outside):
        raise BatchError(f"sequence {i} has the token {outside[0]}, outside of the vocabulary of {n_vocab}")
    return text.astype(np.int32)


# -- the graph of a step -----------------------------------------------------------------------------------------------


class _StepGraph:
    """The graph of a part of a batch, of one shape: the loss, and, with gradients, what is done with them."""

    def __init__(self, t: Trainer, shape: Shape, kind: _Kind, n_again: int) -> None:
        """`n_again`: the values of so many layers, from the first on, are not kept but computed again."""
        self._texts = t.text_graph(shape, 0.0 if kind == "loss" else t.dropout)
        graph, logits, ctx = self._texts.build.graph, self._texts.logits, self._texts.build.ctx
        logits.flags &= ~FLAG_OUTPUT  # nothing reads it after the run
        with ctx, OneSite():
            head = head_of(graph)
            self._size = part_size(head, logits)
            n_parts = -(-logits.ne[1] // self._size)
            self._labels = ctx.new_tensor(DType.I32, (logits.ne[1],), "labels").set_input()
            self._shares, self._seeds = (
                ctx.new_tensor(DType.F32, (n_parts,), name).set_input() for name in ("shares", "gradient of the loss")
            )
            allocate_tensors([self._labels, self._shares, self._seeds], BUFT)
            params, gradients = [*t.params.values()], dict[Tensor, Tensor]()
            seeds = None if kind == "loss" else self._seeds
            self.loss, of_rows, of_head = record_loss(head, self._labels, self._shares, seeds, params, self._size)
            self.loss.set_output()
            # Nothing after this node runs, and no parameter changes, when the loss is no number.
            first = (self.loss, finite("the loss", self.loss))
            if of_rows is not None:
                of_body = gradients_of(head.rows, params, of_rows)
                for w in params:
                    found = [g[w] for g in (of_head, of_body) if w in g]
                    if found:
                        gradients[w] = found[0] if len(found) == 1 else ops.add(*found)
            again = layers_to_compute_again(graph)[:n_again] if n_again else []
            if kind == "step":
                self.graph = with_steps(ctx, first, gradients, t.step_of, t.clip, again, head.rows)
            else:
                self.graph = in_order(first, gradients, lambda w, g: ops.add_inplace(t.sum_of(w), g), again, head.rows)
        self._kind: _Kind = kind

    def fill(self, part: _Part, seed: int, step: int) -> None:
        """Set the inputs."""
        self._texts.fill(part.texts, part.encoded)
        adapters = self._texts.build.adapters
        if isinstance(adapters, Dropout):
            adapters.fill(seed, step, part.number)
        self._labels.set(part.labels)
        counted = [_n_counted(part.labels[i : i + self._size]) for i in range(0, len(part.labels), self._size)]
        shares = np.array(counted, np.float32) / np.float32(sum(counted))
        self._shares.set(shares)
        self._seeds.set(shares * np.float32(part.share if self._kind == "sum" else 1.0))
