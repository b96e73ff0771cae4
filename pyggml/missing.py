"""What is meant by names of NumPy, torch, ggml, transformers and mlx-lm that pyggml does not have: for the messages of
AttributeErrors."""

from __future__ import annotations

import sys
from typing import Any

from .errors import GraphError, nearest

_LOAD = "pyggml.load_model(path) has the model and its tokenizer"
_ARRAYS = "pyggml.Context().from_numpy(array) makes a tensor of an array"
_MEANT = {
    **dict.fromkeys(("array", "asarray", "as_tensor", "from_numpy", "zeros", "ones", "full", "rand", "randn"), _ARRAYS),
    **dict.fromkeys(("float32", "float16", "bfloat16", "int32", "int64"), "types are pyggml.F32, F16, BF16, I32, I64"),
    **dict.fromkeys(("matmul", "dot", "bmm", "linear"), "a @ b is NumPy's product, pyggml.mul_mat(w, x) ggml's"),
    **dict.fromkeys(("cat", "concatenate", "stack", "hstack", "vstack"), "pyggml.concat(a, b, dim) joins two tensors"),
    **dict.fromkeys(("softmax", "log_softmax"), "pyggml.soft_max(a) is of the rows, NumPy's last axis"),
    **dict.fromkeys(("init", "free"), "pyggml.Context() owns tensors, and is freed with its last reference"),
    **dict.fromkeys(("new_graph", "build_forward", "build_forward_expand"), "pyggml.Graph().build_forward_expand(t)"),
    **dict.fromkeys(("draw", "plot", "show"), "pyggml.render(graph, 'g.svg') draws"),
    **dict.fromkeys(("tril", "triu"), "pyggml.tri, pyggml.diag_mask_inf"),
    **dict.fromkeys(("automodel", "automodelforcausallm", "autotokenizer", "autoconfig", "from_pretrained"), _LOAD),
    **dict.fromkeys(("pipeline", "generate", "stream_generate"), "pyggml.load_model(path).generate(prompt), .stream"),
    **dict.fromkeys(("set_seed", "manual_seed"), "seed= of generate and stream"),
    "clip": "pyggml.clamp(a, min, max)",
    "layer_norm": "pyggml.norm(a, eps)",
    "conv2d": "pyggml.conv_2d",
    "embedding": "pyggml.get_rows(table, ids)",
    "gather": "pyggml.get_rows(a, ids)",
    "graph_compute": "pyggml.compute(graph)",
    "graph_dump_dot": "pyggml.dump_dot(graph, path)",
    "pow": "a ** 2",
    "std": "a.var() ** 0.5",
}
_OF_MODELS = {
    **dict.fromkeys(("eos_token_id", "bos_token_id", "eos_token", "bos_token"), "model.vocab.eos, model.vocab.bos"),
    **dict.fromkeys(
        ("apply_chat_template", "chat_template"), "a list of messages is a prompt: model.generate(messages)"
    ),
    **dict.fromkeys(
        ("to", "cuda", "cpu", "eval", "half", "device"), "leave it out: models run on the CPU, and are ready"
    ),
    **dict.fromkeys(("state_dict", "parameters", "named_parameters"), "model.tensors has all tensors by name"),
    **dict.fromkeys(("save_pretrained", "push_to_hub"), "`pyggml convert` writes files and folders"),
    **dict.fromkeys(("encode", "decode", "batch_decode", "tokenizer"), "model.tokenize(text), model.detokenize(ids)"),
    **dict.fromkeys(("config", "generation_config"), "model.hparams, and model.kv with all metadata"),
    **dict.fromkeys(("forward", "logits"), "ctx = model.new_context(n); ctx.decode(ids, 'all'); ctx.logits"),
    "num_parameters": "`pyggml info` counts them",
}
_CALLED = {
    "tensor": _ARRAYS,
    "var": "pyggml.Var(name, hi) is a size that is bound later, a.var(axis) the variance of a tensor",
    "graph": "pyggml.Graph() makes a graph",
}


def of_model(name: str) -> str:
    """What is meant by an attribute that a model does not have; empty when nothing is known."""
    return _OF_MODELS.get(name, "")


def of_call(name: str) -> GraphError:
    """The error about a call of the module `pyggml.NAME`, with what is meant."""
    return GraphError(f"{name} is a module: {_CALLED[name.rpartition('.')[2]]}")


class Missing(AttributeError):
    """The error about `pyggml.NAME`, with what is meant, or a name that is spelt like it. It is an AttributeError, not
    one of pyggml's: `hasattr` must see it. The text is made when it is asked for, because `from pyggml import limits`
    looks for the name before it imports the module."""

    def __str__(self) -> str:
        return _text(*self.args)


def _text(name: str) -> str:
    package: Any = sys.modules["pyggml"]
    names: list[str] = package.__all__
    plain = name.lower().removeprefix("ggml_").removeprefix("type_")
    same = [known for known in (plain, plain.upper()) if known != name and known in names]
    like = same or ([] if plain in _MEANT else nearest(name, names, 1, 0.75))
    meant = f"pyggml.{like[0]}" if like else _MEANT.get(plain, "")
    return f"module 'pyggml' has no attribute {name!r}{f': {meant}' * bool(meant)}"
