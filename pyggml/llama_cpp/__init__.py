"""The interface of llama-cpp-python: code written for that package runs with `from pyggml.llama_cpp import Llama`.

docs/llama_cpp.md says what is the same and what is not.
"""

from .given import LlamaGrammar, LogitsProcessorList, StoppingCriteriaList
from .llama import (
    LLAMA_DEFAULT_SEED,
    LLAMA_POOLING_TYPE_CLS,
    LLAMA_POOLING_TYPE_LAST,
    LLAMA_POOLING_TYPE_MEAN,
    LLAMA_POOLING_TYPE_NONE,
    LLAMA_POOLING_TYPE_RANK,
    LLAMA_POOLING_TYPE_UNSPECIFIED,
    Llama,
)

__all__ = [
    "LLAMA_DEFAULT_SEED",
    "LLAMA_POOLING_TYPE_CLS",
    "LLAMA_POOLING_TYPE_LAST",
    "LLAMA_POOLING_TYPE_MEAN",
    "LLAMA_POOLING_TYPE_NONE",
    "LLAMA_POOLING_TYPE_RANK",
    "LLAMA_POOLING_TYPE_UNSPECIFIED",
    "Llama",
    "LlamaGrammar",
    "LogitsProcessorList",
    "StoppingCriteriaList",
]
