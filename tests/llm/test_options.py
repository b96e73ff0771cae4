"""Keyword arguments that a function hands on are repeated as a TypedDict, for type checkers: the two are the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from pyggml.llm.context import LlamaContext
from pyggml.llm.embed import EmbedOptions, embed
from pyggml.llm.generate.batched import BatchOptions, stream_batch
from pyggml.llm.generate.generation import GenerateOptions, new_generation
from pyggml.llm.openai.request import SamplingRequest
from pyggml.llm.options import ContextOptions
from pyggml.llm.run_batch import batch
from pyggml.llm.samplers import SamplingOptions, TextOptions
from pyggml.llm.samplers.params import N_PREDICT, OTHER_NAMES, TextParams


def declared(kind: Any) -> dict[str, str]:
    """Names and types of a TypedDict, with those that it takes over."""
    return {name: hint.__forward_arg__ for name, hint in kind.__annotations__.items()}


def keywords(f: Callable[..., Any]) -> dict[str, str]:
    """Names and types of a function's keyword arguments."""
    parameters = inspect.signature(f).parameters.values()
    return {p.name: p.annotation for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("kind", "f"),
    [
        (GenerateOptions, new_generation),
        (BatchOptions, stream_batch),
        (ContextOptions, LlamaContext.__init__),
        (EmbedOptions, embed),
    ],
)
def test_keywords_are_those_of_the_function(kind: Any, f: Callable[..., Any]) -> None:
    of_texts = declared(TextOptions) if kind in (GenerateOptions, BatchOptions) else {}
    assert declared(kind) == of_texts | keywords(f)


def test_other_names_have_the_types_of_ours() -> None:
    ours = {f.name: str(f.type) for f in fields(TextParams)}
    assert declared(TextOptions) == {
        **declared(SamplingOptions),
        "stop": ours["stop"],
        **{name: ours[n] for name, n in OTHER_NAMES.items()},
    }
    assert ours.keys() - declared(TextOptions).keys() == {"n_predict"}  # it has a place of its own, behind the prompts
    assert all(inspect.signature(f).parameters["n_predict"].default == N_PREDICT for f in (stream_batch, batch))


def test_a_request_has_options_or_none() -> None:
    known = declared(GenerateOptions)
    extra = {"n", "max_completion_tokens", "tfs_z", "user"}  # of OpenAI and llama-cpp-python alone
    wider = {"logit_bias", "grammar"}  # keys of any kind; a LlamaGrammar
    for name, kind in declared(SamplingRequest).items():
        if name not in extra | wider:
            plain = known[name].removesuffix(" | None")
            assert kind.removesuffix(" | None") == plain, name
