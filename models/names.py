"""The tensors of a model: their GGUF names, and the shape each must have for given hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from pyggml.dtypes import DType
from pyggml.errors import ModelError
from pyggml.tensor import Context, Tensor, full_ne

from .hparams import HParams, LayerShape

Shape = Callable[[HParams, LayerShape], tuple[int, ...]]

# role -> (name without its suffix, ne of the weight). A layer's names hold its number.
_TABLE: dict[str, tuple[str, Shape]] = {
    "token_embd": ("token_embd", lambda h, _: (h.n_embd, h.n_vocab)),
    "output_norm": ("output_norm", lambda h, _: (h.n_embd,)),
    "output": ("output", lambda h, _: (h.n_embd, h.n_vocab)),
    "rope_freqs": ("rope_freqs", lambda h, _: (h.n_rot // 2,)),
    "rope_factors_long": ("rope_factors_long", lambda h, _: (h.n_rot // 2,)),
    "rope_factors_short": ("rope_factors_short", lambda h, _: (h.n_rot // 2,)),
    "attn_norm": ("blk.{}.attn_norm", lambda h, _: (h.n_embd,)),
    "attn_q": ("blk.{}.attn_q", lambda h, n: (h.n_embd, n.n_embd_q)),
    "attn_k": ("blk.{}.attn_k", lambda h, n: (h.n_embd, n.n_embd_k_gqa)),
    "attn_v": ("blk.{}.attn_v", lambda h, n: (h.n_embd, n.n_embd_v_gqa)),
    "attn_output": ("blk.{}.attn_output", lambda h, n: (n.n_embd_out, h.n_embd)),
    "ffn_norm": ("blk.{}.ffn_norm", lambda h, _: (h.n_embd,)),
    "ffn_gate": ("blk.{}.ffn_gate", lambda h, n: (h.n_embd, n.n_ff)),
    "ffn_up": ("blk.{}.ffn_up", lambda h, n: (h.n_embd, n.n_ff)),
    "ffn_down": ("blk.{}.ffn_down", lambda h, n: (n.n_ff, h.n_embd)),
    "ffn_gate_inp": ("blk.{}.ffn_gate_inp", lambda h, _: (h.n_embd, h.n_expert)),
    "ffn_gate_exps": ("blk.{}.ffn_gate_exps", lambda h, n: (h.n_embd, n.n_ff, h.n_expert)),
    "ffn_up_exps": ("blk.{}.ffn_up_exps", lambda h, n: (h.n_embd, n.n_ff, h.n_expert)),
    "ffn_down_exps": ("blk.{}.ffn_down_exps", lambda h, n: (n.n_ff, h.n_embd, h.n_expert)),
}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that an architecture reads: its GGUF name, its ne, and whether a file may lack it."""

    name: str
    ne: tuple[int, ...]
    optional: bool = False


def tensor_name(role: str, il: int = -1, suffix: str = "weight") -> str:
    """`attn_q`, 3 -> `blk.3.attn_q.weight`."""
    return f"{_TABLE[role][0].format(il)}.{suffix}"


def weight(hp: HParams, role: str, il: int = -1, *, optional: bool = False) -> TensorSpec:
    """The weight of that role (of layer `il`)."""
    return TensorSpec(tensor_name(role, il), _TABLE[role][1](hp, hp.layer(max(il, 0))), optional)


def bias(hp: HParams, role: str, il: int) -> TensorSpec:
    """The bias of that role, which a file may always lack: one value for each row of the weight."""
    ne = _TABLE[role][1](hp, hp.layer(il))
    return TensorSpec(tensor_name(role, il, "bias"), ne[1:], True)


def bind_weights(specs: Iterable[TensorSpec], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `specs` by name, without the optional ones that are absent.

    Raises ModelError naming the tensor that is missing or has another shape.
    """
    found: dict[str, Tensor] = {}
    for spec in specs:
        t = tensors.get(spec.name)
        if t is None:
            if not spec.optional:
                raise ModelError(f"the model has no tensor {spec.name} (expected ne {list(spec.ne)})")
        elif t.ne != full_ne(spec.ne):
            raise ModelError(
                f"the tensor {spec.name} has ne {list(t.ne)}, but the hyperparameters ask for {list(full_ne(spec.ne))}"
            )
        else:
            found[spec.name] = t
    return found


def empty_weights(
    specs: Iterable[TensorSpec], dtype: DType = DType.F16, without: Container[str] = ()
) -> dict[str, Tensor]:
    """Weights without memory, to look at a graph without a file. Matrices have type `dtype`, vectors F32.

    Of the tensors that a file may lack only `output.weight` is there; `without` names more to leave out.
    """
    ctx = Context()
    present = [s for s in specs if (not s.optional or s.name == "output.weight") and s.name not in without]
    return {s.name: ctx.new_tensor(dtype if len(s.ne) > 1 else DType.F32, s.ne, s.name) for s in present}
