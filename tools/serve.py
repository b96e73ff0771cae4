"""`pyggml serve`: a server with llama-server's, OpenAI's and Anthropic's interface."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, get_type_hints

import click

from pyggml.errors import ModelError
from pyggml.llm.model import Model, load_model
from pyggml.llm.samplers import TextParams
from pyggml.serve.options import ListenOptions, ServeOptions, flags

from .adapters import Adapters
from .command import Group, Option
from .media import Mmproj
from .options import usage
from .running import Run
from .sampling import Sampling, Stop, declared


def _group(record: type[Any], panel: str) -> Group[dict[str, Any]]:
    """One option for each field of a record that has a flag."""
    kinds = get_type_hints(record)
    found = flags(record)
    hints = {
        name: Annotated[kinds[name], Option(*flag.flags, help=flag.help, min=flag.min, panel=panel)]
        for name, (flag, _) in found.items()
    }
    return Group(hints, {name: default for name, (_, default) in found.items()}, lambda values: values)


Served = Annotated[dict[str, Any], _group(ServeOptions, "Server (names as in llama-server)")]
Listen = Annotated[dict[str, Any], _group(ListenOptions, "Address (names as in llama-server)")]


def serve(
    served: Served,
    listen: Listen,
    sampling: Sampling,
    adapters: Adapters,
    run: Run,
    mmproj: Mmproj = None,
    n_predict: Annotated[int, declared("n_predict", "Tokens of an answer; -1: until it ends.")] = -1,
    stop: Stop = None,
) -> None:
    """Serve a model over HTTP: llama-server's endpoints, OpenAI's and Anthropic's. Options for sampling count where a
    request says nothing else."""
    from pyggml.serve.budget import ram_of_weights
    from pyggml.serve.run import run as run_server

    with usage(ModelError):
        defaults = TextParams(**sampling, n_predict=n_predict, stop=tuple(stop or ()))
        options = ServeOptions(**served, ram=run.ram, defaults=defaults, context=run.context())
    if options.models_dir is not None and run.model is not None:
        raise click.UsageError("-m serves one model, --models-dir those of a folder: give one of the two")

    if options.models_dir is not None and mmproj is not None:
        raise click.UsageError("--mmproj belongs to one model, not to those of --models-dir")

    def load(path: str | None) -> Model:
        at = run if path is None else replace(run, model=path)
        if at.ram is not None:
            with load_model(at.model, vocab_only=True, kv_overrides=at.kv_overrides()) as known:
                at = replace(at, ram=str(ram_of_weights(known, options)))
        m = at.load(mmproj)
        adapters.apply(m)
        return m

    run_server(load, options, ListenOptions(**listen), run.verbose)
