"""The interface of llama-cpp-python: code written for that package runs with `from pyggml.llama_cpp import Llama`.

Modules have that package's names. docs/llama_cpp.md says what is the same and what is not.
"""

from typing import Any

from . import llama_cpp, llama_types
from .llama import Llama, LogitsProcessorList, StoppingCriteriaList
from .llama_cache import BaseLlamaCache, LlamaCache, LlamaDiskCache, LlamaRAMCache, LlamaState
from .llama_grammar import LlamaGrammar

__version__ = "0.3.36"  # the version of llama-cpp-python whose interface this is

__all__ = [
    "BaseLlamaCache",
    "Llama",
    "LlamaCache",
    "LlamaDiskCache",
    "LlamaGrammar",
    "LlamaRAMCache",
    "LlamaState",
    "LogitsProcessorList",
    "StoppingCriteriaList",
    "llama_cpp",
    "llama_types",
]


def __getattr__(name: str) -> Any:
    """Names of the low-level functions and of the types stand in this module, too."""
    if name.startswith(("Chat", "Completion", "Create", "Embedding", "Json")):
        return getattr(llama_types, name)
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(llama_cpp, name)
