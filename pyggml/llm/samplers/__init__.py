"""Samplers: small classes in a chain that choose the next token from logits."""

from .base import LogitsProcessor
from .chain import SamplerChain
from .guidance import guided, log_softmax
from .params import NamedOptions, SamplingOptions, SamplingParams, our_names, sampling_params
from .trace import SamplerTrace, StepTrace

__all__ = [
    "LogitsProcessor",
    "NamedOptions",
    "SamplerChain",
    "SamplerTrace",
    "SamplingOptions",
    "SamplingParams",
    "our_names",
    "sampling_params",
    "StepTrace",
    "guided",
    "log_softmax",
]
