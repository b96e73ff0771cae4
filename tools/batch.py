"""`pyggml batch`: continue thousands of prompts, from a file into a file."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Optional

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pyggml.dtypes import DType
from pyggml.llm.generate.request_file import Answers, RequestFile
from pyggml.llm.model import model_digest
from pyggml.llm.options import ContextOptions
from pyggml.llm.run_batch import batch as gg_batch
from pyggml.llm.samplers.params import N_PREDICT, SamplingOptions, SamplingParams
from pyggml.stream.sizes import memory_size

from .adapters import Adapters
from .command import Option
from .options import Json
from .outputs import print_json
from .running import Run
from .sampling import Sampling, Stop, declared

_SHOWN = 80  # a record has texts up to this length in full
_RAY = "On a cluster (pip install pyggml[ray])"


def batch(
    sampling: Sampling,
    adapters: Adapters,
    run: Run,
    requests: Annotated[
        Path,
        Option("-i", "--input", help="Requests, one JSON object a line; -: the standard input.", metavar="F"),
    ],
    results: Annotated[Path, Option("-o", "--output", help="Results, one in each line.", metavar="F")],
    n_predict: Annotated[int, declared("n_predict", "Tokens of each; -1: no limit.")] = N_PREDICT,
    n_parallel: Annotated[int, Option("-np", "--parallel", help="Evaluated side by side.", min=1)] = 32,
    stop: Stop = None,
    kv_ram: Annotated[
        Optional[str],
        Option(
            "--kv-ram", help="Memory for the K/V cache: a larger one lies in a file.", metavar="SIZE", check=memory_size
        ),
    ] = None,
    ray: Annotated[
        Optional[str],
        Option(
            "--ray",
            help="Workers of a Ray cluster: local starts one here, auto finds the one that runs.",
            metavar="ADDRESS",
            panel=_RAY,
        ),
    ] = None,
    workers: Annotated[
        Optional[int],
        Option("--workers", help="Processes with a model each (default: one a node).", min=1, panel=_RAY),
    ] = None,
    stages: Annotated[
        Optional[int],
        Option("--stages", help="... or so many that share the layers of one model.", min=1, panel=_RAY),
    ] = None,
    retry_errors: Annotated[
        bool, Option("--retry-errors", help="Answer those requests again whose result is an error.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Continue the prompt on each line of a file: {"prompt": "..."} or {"messages": [...]}. A line may also have
    "id", "n_predict" (or "max_tokens"), "stop", sampling parameters (such as "temp", "json_schema") and, with
    messages, "tools". Lines of OpenAI's batch files ("custom_id", "url", "body") are taken, too, and their results
    have its "response". {"input": "..."} asks for the embedding of a text. Results are written in order as they
    come; when it is run again after a kill, it goes on where it stopped. The result of a bad line is an "error". A
    file with results of another model, or of other options, is refused: name another file."""
    if ray is None and (workers is not None or stages is not None):
        raise click.BadParameter("--workers and --stages are of --ray")
    if ray is not None and kv_ram is not None:
        raise click.BadParameter("--kv-ram is of a batch without --ray")
    if workers is not None and stages is not None:
        raise click.BadParameter("give --workers, which have whole models, or --stages of one")
    context, overrides = run.context(), run.kv_overrides()
    record = {
        "model": model_digest(run.model, overrides),
        "options": {**_asked(sampling, n_predict, stop, context, run.precision), **adapters.digest()},
    }
    options: dict[str, Any] = {"stop": stop or (), "n_parallel": n_parallel, "context": context, **sampling}

    @contextmanager
    def answers() -> Generator[Answers]:
        if ray is None:
            m = run.load()
            adapters.apply(m)
            yield lambda todo: gg_batch(m, todo, n_predict, kv_ram=kv_ram, **options)
            return
        from pyggml.cluster.on_ray import RayActors
        from pyggml.cluster.run import batch_on

        with RayActors(ray) as actors:
            options.update({"workers": workers, "stages": stages, "ram": run.ram, "prepare": adapters.apply})
            options.update({"n_threads": run.threads, "flash_attn": run.flash_attn != "off"})
            options.update({"kv_overrides": overrides, "precision": run.precision})
            del context["n_threads"], context["n_threads_batch"]  # each node uses all of its CPUs
            yield lambda todo: batch_on(actors, run.model, todo, n_predict, **options)

    n_tokens = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with RequestFile(requests, results, record, retry_errors) as file:
        had = file.n_done
        if had < file.n_requests:
            with (
                answers() as answer,
                Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json) as progress,
            ):
                task = progress.add_task("batch", total=file.n_requests, completed=had)
                for result in file.run(answer):
                    n_tokens += result.get("n_predicted", 0)
                    elapsed = progress.tasks[0].elapsed or 0.0
                    rate = f"{n_tokens / elapsed:.1f} tokens/s" if elapsed else "batch"
                    progress.update(task, description=rate, completed=file.n_done)
    about = {"requests": file.n_requests, "resumed_at": had, "errors": file.n_errors, "n_predicted": n_tokens}
    if as_json:
        print_json(about)
        return
    before = f" ({had} were there)" if had else ""
    again = " (--retry-errors answers them again)" if file.n_errors else ""
    about_all = f"{file.n_done} results{before}, {file.n_errors} errors{again}, {n_tokens} tokens"
    print(f"{about_all} -> {results}", file=sys.stderr)


def _asked(
    sampling: SamplingOptions, n_predict: int, stop: Sequence[str] | None, context: ContextOptions, precision: str
) -> dict[str, Any]:
    """The options that results depend on, for the record of each result: those that differ from their defaults, and
    always `n_predict`. Long texts, such as grammars, are recorded as their SHA-256."""
    plain: dict[str, Any] = vars(SamplingParams())
    asked: dict[str, Any] = {"n_predict": n_predict}
    params = SamplingParams(**sampling)
    given: dict[str, Any] = {**vars(params), "samplers": params.order}
    for name, value in given.items():
        if value != plain[name]:
            asked[name] = {str(k): str(v) for k, v in value.items()} if name == "logit_bias" else value
    if stop:
        asked["stop"] = list(stop)
    for name in ("type_k", "type_v"):
        if (dtype := context.get(name, DType.F16)) is not DType.F16:
            asked[name] = dtype.name
    if precision != "exact":
        asked["precision"] = precision
    return {name: value if len(text := repr(value)) <= _SHOWN else _digest(text) for name, value in asked.items()}


def _digest(text: str) -> str:
    return f"sha256:{sha256(text.encode()).hexdigest()[:16]}"
