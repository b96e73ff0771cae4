"""`pyggml serve`: a server with llama-server's, OpenAI's and Anthropic's interface."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Optional, get_type_hints

import click
from click.core import ParameterSource

from pyggml.errors import ModelError
from pyggml.llm.model import Model, load_model
from pyggml.llm.samplers import TextParams
from pyggml.serve.budget import ram_of_weights
from pyggml.serve.options import ListenOptions, Preset, ServeOptions, flags

from .adapters import Adapters
from .command import Group, Option, verb
from .media import Towers
from .options import the_model, usage
from .presets import MODEL_KEYS, arguments, is_true, read_sections
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


@dataclass(frozen=True)
class Asked:
    """The values of these options."""

    served: Annotated[dict[str, Any], _group(ServeOptions, "Server (names as in llama-server)")]
    listen: Annotated[dict[str, Any], _group(ListenOptions, "Address (names as in llama-server)")]
    sampling: Sampling
    adapters: Adapters
    run: Run
    towers: Towers
    n_predict: Annotated[int, declared("n_predict", "Tokens of an answer; -1: until it ends.")] = -1
    stop: Stop = None

    def options(self) -> ServeOptions:
        """What the server offers. An error of usage for values that make no sense."""
        run = self.run
        with usage(ModelError):
            defaults = TextParams(**self.sampling, n_predict=self.n_predict, stop=tuple(self.stop or ()))
            return ServeOptions(**self.served, ram=run.ram, defaults=defaults, context=run.context())

    def load(self, options: ServeOptions, path: str | None) -> Model:
        """Load a model by its path, with its adapters; None: the one that is asked for."""
        at = self.run if path is None else replace(self.run, model=path)
        if at.ram is not None:
            with load_model(at.model, vocab_only=True, kv_overrides=at.kv_overrides()) as known:
                at = replace(at, ram=str(ram_of_weights(known, options)))
        m = at.load(self.towers)
        self.adapters.apply(m)
        return m


Served = Annotated[Asked, Group.of(Asked)]


def serve(
    asked: Served,
    models_preset: Annotated[
        Optional[Path],
        Option("--models-preset", help="INI file: a model and its options in each section.", metavar="FILE"),
    ] = None,
) -> None:
    """Serve a model over HTTP: llama-server's endpoints, OpenAI's and Anthropic's. Options for sampling count where a
    request says nothing else."""
    from pyggml.serve.run import run as run_server

    options = asked.options()
    several = options.models_dir is not None or models_preset is not None
    ctx = click.get_current_context()
    if several and ctx.get_parameter_source("model") is ParameterSource.COMMANDLINE:
        raise click.UsageError("-m serves one model, --models-dir and --models-preset several: give one of the two")
    if several and asked.towers.mmproj is not None:
        raise click.UsageError("--mmproj belongs to one model, not to those of --models-dir or --models-preset")
    presets = None if models_preset is None else presets_of(models_preset, ctx)
    run_server(partial(asked.load, options), options, ListenOptions(**asked.listen), asked.run.verbose, presets)


def presets_of(path: Path, ctx: click.Context) -> dict[str, Preset]:
    """The sections of an INI file by name. Their keys are this verb's options without dashes; those of [*] are for all
    models, and options of the command line `ctx` count more than both. An error of usage for any other key."""
    given = {k: v for k, v in ctx.params.items() if ctx.get_parameter_source(k) is ParameterSource.COMMANDLINE}
    given.pop("models_dir", None)
    return {name: _preset(f"{path}: [{name}]", keys, given) for name, keys in read_sections(path).items()}


def _preset(where: str, keys: dict[str, str], given: dict[str, Any]) -> Preset:
    """The model and the options of a section."""
    found: list[Asked] = []

    def keep(asked: Served) -> None:
        found.append(asked)

    command = verb("serve", keep)
    named = [keys.pop(key) for key in MODEL_KEYS if key in keys]
    try:
        at_start = is_true(keys.pop("load-on-startup", "false"))
        ctx = command.make_context("serve", arguments(command, keys))
        with ctx:
            ctx.invoke(command, **{**ctx.params, **{k: v for k, v in given.items() if k in ctx.params}})
        (asked,) = found
        options = asked.options()
    except click.ClickException as e:
        raise click.UsageError(f"{where}: {e.format_message()}") from None

    def load(path: str) -> Model:
        return asked.load(options, the_model(path))

    return Preset(named[-1] if named else None, options, load, at_start)
