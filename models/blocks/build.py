"""`Build`: one graph in the making, the first argument of every block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple

import numpy as np
import numpy.typing as npt

from pyggml import ops as gg
from pyggml.dtypes import DType
from pyggml.errors import GraphError, ModelError
from pyggml.tensor import Tensor, Var

from ..hparams import H_co, NormKind
from ..memory.kv_cache import KVCache
from ..memory.memory import Memory
from ..memory.recurrent import RecurrentCells
from ..names import tensor_name
from ..twins import BuiltLayer, Twin
from ..ubatch import UBatch
from ..weights import Weights
from .adapt import NO_ADAPTERS, Adapters
from .weighted import WeightedGraph

Values = npt.NDArray[np.int32] | npt.NDArray[np.float32]
Fill = Callable[[UBatch, Memory], Sequence[Values]]  # gives the values of a group of inputs
FillOne = Callable[[UBatch, Memory], Values]


def mask_name(kv: KVCache) -> str:
    """The name of the mask of a cache."""
    return "KQ_mask_cross" if kv.cross else "KQ_mask_swa" if kv.n_swa else "KQ_mask"


class InputGroup(NamedTuple):
    """Inputs that one function fills: their names, and the function, which returns the values of each."""

    names: tuple[str, ...]
    fill: Fill


class Input(NamedTuple):
    """A leaf of a graph that gets new values before each run.

    fill      gives its values. None: the function of its group does, or, without a group, whoever runs the graph
    group     the inputs that were asked for together with it
    of_tokens its values follow from token ids, which a stage after the first does not have
    """

    tensor: Tensor
    fill: FillOne | None = None
    group: InputGroup | None = None
    of_tokens: bool = False


class CacheUse(NamedTuple):
    """How a graph uses one cache: the number of cells that attention looks at (in a transient cache those of the
    ubatch), the first cell of the ubatch's slot (bound when the graph runs), and the name of the mask."""

    kv: KVCache
    n_kv: int
    head: Var
    mask: str


# Tensors that a draft head may have in its own block, by role; a missing one falls back to the model's.
_OF_HEAD = {
    "token_embd": ("nextn.embed_tokens",),
    "output_norm": ("nextn.shared_head_norm", "layer_output_norm"),
    "output": ("nextn.shared_head_head",),
}


def _no_one(name: str) -> bool:
    return False


class Build(WeightedGraph, Generic[H_co]):
    """One graph in the making: the model, the cache, the sizes of the batch, and the inputs created so far.

    weights     the tensors that `weight`, `optional` and `linear` ask for; it notes which were asked for
    n_tokens    tokens of the ubatch
    n_outputs   tokens whose logits are wanted
    n_kv        cells that attention looks at, in each of the memory's caches
    n_seqs      for a memory with states: how many sequences the tokens belong to. Each has equally many tokens, and
                one sequence comes after the other
    embd        embeddings are given instead of tokens
    mixed       some tokens are rows of pictures or sounds, which are given (`UBatch.media`)
    embeddings  the graph ends with the embeddings of tokens instead of their logits
    layer       these are the embeddings after this layer (0: before the first); None: after the last one and its norm
    first       the graph is to begin with this layer, see `begin_at`
    uses        how each of the memory's caches is used
    kept        K, ne [n_embd_head_k, n_head_kv, n], and V, ne [n_embd_head_v, n_head_kv, n], of the layers of caches
                that are transient; V is None when it is in K, or when the layer has none
    adapters    what is added to products and to the outputs of layers
    twins       which layers are like an earlier layer in such graphs, see `layers`
    asked       tells whether anyone will look at the node with this name. When the node would be fused into an op, that
                op is then built of several ops
    n_logits    in a graph of hidden states, where all tokens have an output: the tokens whose logits are wanted
    hidden      in a graph of hidden states: the node that draft heads read, ne [n_embd, n_tokens]

    Given the hyperparameters of a draft head, it is the graph of that head, see `build_inp_embd`.
    """

    def __init__(
        self,
        hparams: H_co,
        weights: Weights,
        kv: Memory,
        n_tokens: int,
        n_outputs: int,
        n_kv: tuple[int, ...],
        embd: bool = False,
        adapters: Adapters = NO_ADAPTERS,
        n_seqs: int = 1,
        *,
        embeddings: bool = False,
        layer: int | None = None,
        first: int = 0,
        hidden: bool = False,
        mixed: bool = False,
    ) -> None:
        if not 0 < n_tokens <= kv.size:
            raise GraphError(f"n_tokens must be 1 to {kv.size}, the cells of the cache, not {n_tokens}")
        if not 0 < n_outputs <= n_tokens:
            raise GraphError(f"n_outputs must be 1 to {n_tokens}, the tokens of the batch, not {n_outputs}")
        if n_tokens % n_seqs:
            raise GraphError(f"n_tokens must be a multiple of n_seqs = {n_seqs}, not {n_tokens}")
        self.n_seqs, self.n_seq_tokens = n_seqs, n_tokens // n_seqs
        super().__init__(weights)
        self.hparams, self.kv = hparams, kv
        self.n_tokens, self.embd, self.mixed = n_tokens, embd, mixed
        self.n_outputs = n_tokens if hidden else n_outputs
        self.n_logits = n_outputs if hidden else 0
        self.hidden: Tensor | None = None
        self.adapters = adapters
        self.embeddings, self.layer, self.first = embeddings, layer, first
        self.uses = tuple(
            CacheUse(c, n_tokens if c.transient and not c.cross else n, Var("kv_head", c.size - n_tokens), mask_name(c))
            for c, n in zip(kv.caches, n_kv, strict=True)
        )
        self.n_kv = tuple(u.n_kv for u in self.uses)
        self.kept: dict[tuple[KVCache, int], tuple[Tensor, Tensor | None]] = {}
        self.inputs: dict[str, Input] = {}
        self._named: dict[str, Tensor] = {}
        self.built: list[BuiltLayer] = []
        self.twins: Mapping[int, Twin] = {}
        self.masks: dict[str, Tensor] = {}
        self.asked: Callable[[str], bool] = _no_one

    @property
    def n_ctx(self) -> int:
        """How many tokens a text may have: as many as the memory has cells; over a transient cache as many as each
        sequence of the batch has."""
        return self.n_seq_tokens if any(u.kv.transient for u in self.uses) else self.kv.size

    def layers(self, layer: Callable[[Tensor, int], Tensor], inpL: Tensor) -> Tensor:
        """Build all layers and return the result of the last one. The first layer reads `inpL`, each other one the
        result of the layer before it. `layer(inpL, il)` builds one layer, which hands nothing to other layers but its
        result. Layers in `twins` are repeated instead of built."""
        self.graph.build_forward_expand(inpL)
        for il in range(self.hparams.n_layer):
            begin, twin = self.graph.n_nodes, self.twins.get(il)
            if twin is None:
                cur = layer(inpL, il)
                self.graph.build_forward_expand(cur)
            else:
                like = self.built[twin.like]
                to: dict[Tensor | None, Tensor] = {**twin.leafs, like.inpL: inpL}
                self.graph.repeat(like.nodes, to, twin.names)
                cur = to[like.cur]
            self.built.append(BuiltLayer(range(begin, self.graph.n_nodes), inpL, cur))
            inpL = cur
        return inpL

    def use(self, il: int) -> CacheUse:
        """How layer `il` uses its cache. Raises ModelError when none has K and V for it."""
        found = next((u for u in self.uses if il in u.kv.index and not u.kv.cross), None)
        if found is None:
            raise ModelError(f"hyperparameter n_head_kv: layer {il} attends, and has no heads of K and V")
        return found

    @property
    def cross(self) -> CacheUse:
        """How the cache of the encoded text is used. The memory must have one."""
        return next(u for u in self.uses if u.kv.cross)

    @property
    def states(self) -> RecurrentCells:
        """The cells of recurrent layers, which the memory must have."""
        states = self.kv.states
        assert states is not None, self.kv
        return states

    def cb(self, t: Tensor, name: str, il: int = -1) -> Tensor:
        """Name a node as llama.cpp does: `Qcur-0` in a layer, `result_norm` outside of one. `l_out` is the output of a
        layer; a control vector is added to it."""
        if name == "l_out" and il in self.adapters.control:
            t = gg.add(t.set_name(f"ffn_out-{il}"), self.adapters.control[il])
        t.name = name if il < 0 else f"{name}-{il}"
        if self.layer is not None or self.first:
            self._named[t.name] = t
        return t

    def named(self, name: str) -> Tensor:
        """The node with this name, in a graph that ends after a `layer` or begins with one. Raises ModelError when
        there is no such node."""
        if name not in self._named:
            raise ModelError(f"the graph of this architecture has no {name} to be cut at")
        return self._named[name]

    def input(
        self, name: str, dtype: DType, ne: tuple[int, ...], fill: FillOne | None, *, of_tokens: bool = False
    ) -> Tensor:
        """The input leaf with this name; it is made when it is first asked for.

        fill       called as `fill(ubatch, memory)` before each run, when the ubatch is in its cells. Gives the values:
                   an array in NumPy order. It may have fewer elements than the leaf; the others keep what they had, and
                   nothing may depend on them. None: whoever runs the graph sets the values
        of_tokens  the values follow from token ids
        """
        if name not in self.inputs:
            self.inputs[name] = Input(self._leaf(name, dtype, ne), fill, of_tokens=of_tokens)
        return self.inputs[name].tensor

    def input_group(self, leafs: Mapping[str, tuple[DType, tuple[int, ...]]], fill: Fill) -> tuple[Tensor, ...]:
        """Several inputs, {name: (type, ne)}, that one function fills: it gives an array for each, see `input`."""
        group = InputGroup(tuple(leafs), fill)
        for name, (dtype, ne) in leafs.items():
            if name not in self.inputs:
                self.inputs[name] = Input(self._leaf(name, dtype, ne), group=group)
        return tuple(self.inputs[name].tensor for name in leafs)

    @property
    def input_groups(self) -> list[InputGroup]:
        """The groups of all inputs, in the order in which they were asked for."""
        return list(dict.fromkeys(i.group for i in self.inputs.values() if i.group is not None))

    def _leaf(self, name: str, dtype: DType, ne: tuple[int, ...]) -> Tensor:
        return self.ctx.new_tensor(dtype, ne, name).set_input()

    # -- weights ---------------------------------------------------------------------------------------------------

    def norm_eps(self, kind: NormKind) -> float:
        """See `WeightedGraph`."""
        return self.hparams.f_norm_rms_eps if kind == "rms" else self.hparams.f_norm_eps

    def name(self, role: str, il: int, suffix: str = "weight") -> str:
        """The name of the tensor of that role (of layer `il`) in a file. A head's own come before those it shares."""
        if il < 0 and self.hparams.is_head:
            for own in _OF_HEAD.get(role, ()):
                name = tensor_name(own, self.hparams.first_block, suffix)
                if self.weights.ne(name) is not None:
                    return name
        return tensor_name(role, il if il < 0 else self.hparams.block(il), suffix)

    def mul_mat(self, w: Tensor, cur: Tensor) -> Tensor:
        """w @ cur, and what adapters add to the product of that weight."""
        return self.adapters.product(gg.mul_mat(w, cur), w.name, cur)
