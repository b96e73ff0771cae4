"""Samplers: small classes in a chain that choose the next token from logits."""

from .base import LogitsProcessor
from .chain import SamplerChain
from .guidance import guided, log_softmax
from .params import (
    N_PREDICT,
    TEXT_KEYWORDS,
    SamplingOptions,
    SamplingParams,
    TextOptions,
    TextParams,
    our_names,
    text_params,
    with_options,
)
from .trace import SamplerTrace, StepTrace

__all__ = [
    "LogitsProcessor",
    "N_PREDICT",
    "SamplerChain",
    "SamplerTrace",
    "SamplingOptions",
    "SamplingParams",
    "our_names",
    "StepTrace",
    "TEXT_KEYWORDS",
    "TextOptions",
    "TextParams",
    "guided",
    "log_softmax",
    "text_params",
    "with_options",
]
