"""pyggml: ggml for Python people. A tensor IR, a graph you can look into, fast CPU kernels, and GGUF models that run.

`import pyggml as gg`, then `gg.Context`, the ops (`gg.mul_mat` ...), `gg.Graph`, `gg.compute`, `gg.load_model`.
"""

from __future__ import annotations

from importlib import import_module
from sys import modules
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

# Before all else: deeper in a chain of imports, CPython 3.11 may map and unmap memory for frames 1,000 times (15 ms).
import numpy as _np  # noqa: F401  # pyright: ignore[reportUnusedImport]

from . import codec, ops
from . import native as _native  # noqa: F401  # pyright: ignore[reportUnusedImport]  # says when it is not built
from .buffers.alloc import Plan
from .dtypes import DType
from .errors import (
    Aborted,
    AllocError,
    BackendError,
    BatchError,
    ClosedError,
    DTypeError,
    GGMLError,
    GGUFError,
    GraphError,
    KVCacheFull,
    MediaError,
    ModelError,
    OptionError,
    SamplerError,
    ShapeError,
    StateError,
)
from .graph import Graph
from .opdef import Cost, OpDef, elementwise_cost, record, rule
from .ops import *
from .scope import scope
from .tensor import Context, Tensor
from .var import Size, Var, Varies

if TYPE_CHECKING:
    from .backends.cpu import get_include, register_kernel
    from .backends.protocol import register_backend
    from .backends.quantize import dequantize, quantize
    from .buffers.buffer import register_device_buffer
    from .gguf_io.tensor_file import TensorFile, load, save
    from .inspect.dot import Drawing, dump_dot, render
    from .inspect.page import inspect
    from .learn.adafactor import Adafactor
    from .learn.dataset import Dataset
    from .learn.fit import fit
    from .learn.gradients import grad
    from .learn.lora import LoRA
    from .learn.muon import Muon
    from .learn.optimisers import SGD, AdamW, AdamW8, schedule
    from .llm.batch import Batch
    from .llm.context import LlamaContext
    from .llm.embed import EmbedOptions
    from .llm.generate.batched import BatchOptions
    from .llm.generate.chat import ChatSession
    from .llm.generate.generation import GenerateOptions
    from .llm.media_prompt import MediaPrompt
    from .llm.model import Model, load_model
    from .llm.options import ContextOptions
    from .llm.run_batch import batch
    from .llm.samplers import SamplingOptions, SamplingParams, TextOptions
    from .models import register_architecture
    from .native.numa import numa_init
    from .run_graph import compute, eval
    from .sched import Scheduler
else:
    from . import inspect  # the room itself, which can be called

__version__ = "0.1.0"


class _Room(ModuleType):
    """A module whose name is a function elsewhere (torch.tensor, np.var): calling it says what is meant."""

    def __call__(self, *args: Any, **options: Any) -> NoReturn:
        raise import_module(".missing", __name__).of_call(self.__name__)


for _module in ("tensor", "var", "graph"):
    modules[f"{__name__}.{_module}"].__class__ = _Room

# What notebooks show: imported when one does.
Graph.svg = lambda graph: import_module(".inspect.dot", __name__).svg(graph)
Tensor.html = lambda t: import_module(".inspect.notebook", __name__).tensor_html(t)
Plan.html = lambda plan: import_module(".inspect.notebook", __name__).plan_html(plan)

# What rounds to the types that the gguf package does not write: as late.
codec.quantize_rows = lambda rows, dtype: import_module(".backends.quantize", __name__).quantize(rows, dtype)

# What records gradients: as late.
Graph.gradients = lambda graph, loss, accs: import_module(".learn.gradients", __name__).expand(graph, loss, accs)

F64, F32, F16, BF16 = DType.F64, DType.F32, DType.F16, DType.BF16
I8, I16, I32, I64 = DType.I8, DType.I16, DType.I32, DType.I64
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1 = DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.Q8_0, DType.Q8_1
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K = DType.Q2_K, DType.Q3_K, DType.Q4_K, DType.Q5_K, DType.Q6_K, DType.Q8_K
IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S = DType.IQ1_S, DType.IQ1_M, DType.IQ2_XXS, DType.IQ2_XS, DType.IQ2_S
IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS = DType.IQ3_XXS, DType.IQ3_S, DType.IQ4_NL, DType.IQ4_XS
TQ1_0, TQ2_0, MXFP4, NVFP4, Q1_0 = DType.TQ1_0, DType.TQ2_0, DType.MXFP4, DType.NVFP4, DType.Q1_0

__all__ = [
    "BF16",
    "F16",
    "F32",
    "F64",
    "I8",
    "I16",
    "I32",
    "I64",
    "IQ1_M",
    "IQ1_S",
    "IQ2_S",
    "IQ2_XS",
    "IQ2_XXS",
    "IQ3_S",
    "IQ3_XXS",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "NVFP4",
    "Q1_0",
    "Q2_K",
    "Q3_K",
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "Q5_0",
    "Q5_1",
    "Q5_K",
    "Q6_K",
    "Q8_0",
    "Q8_1",
    "Q8_K",
    "TQ1_0",
    "TQ2_0",
    "AdamW",
    "AdamW8",
    "Adafactor",
    "AllocError",
    "Aborted",
    "BackendError",
    "BatchError",
    "ClosedError",
    "Batch",
    "MediaPrompt",
    "BatchOptions",
    "ChatSession",
    "Context",
    "ContextOptions",
    "Cost",
    "DType",
    "DTypeError",
    "Dataset",
    "Drawing",
    "EmbedOptions",
    "GGMLError",
    "GGUFError",
    "GenerateOptions",
    "Graph",
    "GraphError",
    "KVCacheFull",
    "LlamaContext",
    "LoRA",
    "MediaError",
    "Model",
    "OpDef",
    "ModelError",
    "Muon",
    "OptionError",
    "SGD",
    "SamplerError",
    "SamplingOptions",
    "SamplingParams",
    "Scheduler",
    "ShapeError",
    "Size",
    "StateError",
    "Tensor",
    "TensorFile",
    "TextOptions",
    "Var",
    "Varies",
    "batch",
    "compute",
    "dequantize",
    "dump_dot",
    "elementwise_cost",
    "eval",
    "fit",
    "get_include",
    "grad",
    "inspect",
    "load",
    "load_model",
    "numa_init",
    "quantize",
    "record",
    "register_architecture",
    "register_backend",
    "register_device_buffer",
    "register_kernel",
    "render",
    "rule",
    "save",
    "schedule",
    "scope",
]
__all__ += ops.__all__

# Imported when they are asked for: who builds graphs does not wait for what runs or draws models.
_LATER = {
    **dict.fromkeys(("compute", "eval"), "run_graph"),
    "Scheduler": "sched",
    **dict.fromkeys(("get_include", "register_kernel"), "backends.cpu"),
    "register_backend": "backends.protocol",
    "register_device_buffer": "buffers.buffer",
    **dict.fromkeys(("dequantize", "quantize"), "backends.quantize"),
    **dict.fromkeys(("TensorFile", "load", "save"), "gguf_io.tensor_file"),
    **dict.fromkeys(("Drawing", "dump_dot", "render"), "inspect.dot"),
    **dict.fromkeys(("Model", "load_model"), "llm.model"),
    "Dataset": "learn.dataset",
    "fit": "learn.fit",
    "grad": "learn.gradients",
    "LoRA": "learn.lora",
    "Adafactor": "learn.adafactor",
    **dict.fromkeys(("AdamW", "AdamW8", "SGD", "schedule"), "learn.optimisers"),
    "Muon": "learn.muon",
    **dict.fromkeys(("SamplingOptions", "SamplingParams", "TextOptions"), "llm.samplers"),
    "Batch": "llm.batch",
    "MediaPrompt": "llm.media_prompt",
    "BatchOptions": "llm.generate.batched",
    "ChatSession": "llm.generate.chat",
    "ContextOptions": "llm.options",
    "EmbedOptions": "llm.embed",
    "GenerateOptions": "llm.generate.generation",
    "LlamaContext": "llm.context",
    "batch": "llm.run_batch",
    "numa_init": "native.numa",
    "register_architecture": "models",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise import_module(".missing", __name__).Missing(name)
    value = globals()[name] = getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
