"""`pyggml batch`: continue thousands of prompts, from a file into a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Optional

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pyggml.llm.generate.request_file import Answers, RequestFile
from pyggml.llm.generate.requests import batch as gg_batch
from pyggml.stream.layout import memory_size

from .adapters import Adapters
from .command import Option
from .options import Json, Stop
from .running import Run
from .sampling import Sampling

_RAY = "On a cluster (pip install pyggml[ray])"


def batch(
    sampling: Sampling,
    adapters: Adapters,
    run: Run,
    requests: Annotated[
        Path,
        Option(
            "-i", "--input", help="Requests: in each line a JSON object with prompt, messages or input.", metavar="F"
        ),
    ],
    results: Annotated[Path, Option("-o", "--output", help="Results, one in each line.", metavar="F")],
    n_predict: Annotated[int, Option("-n", "--n-predict", help="Tokens of each; -1: no limit.")] = 128,
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
    as_json: Json = False,
) -> None:
    """Continue the prompt of each line of a file: {"prompt": "..."} or {"messages": [...]}, with "id", "n_predict",
    "stop" and sampling parameters (as "temp", "json_schema") where it likes; or embed the text of {"input": "..."}.
    Results are written in order as they come; run again after a kill, it goes on where it was. A bad line has an
    "error" for its result."""
    if ray is None and (workers is not None or stages is not None):
        raise click.BadParameter("--workers and --stages are of --ray")
    if ray is not None and kv_ram is not None:
        raise click.BadParameter("--kv-ram is of a batch without --ray")
    if workers is not None and stages is not None:
        raise click.BadParameter("give --workers, which have whole models, or --stages of one")
    options: dict[str, Any] = {"stop": stop or (), "n_parallel": n_parallel, **sampling}

    @contextmanager
    def answers() -> Generator[Answers]:
        if ray is None:
            context = run.context()
            m = run.load()
            adapters.apply(m)
            yield lambda todo: gg_batch(m, todo, n_predict, kv_ram=kv_ram, context=context, **options)
            return
        from pyggml.cluster.on_ray import RayActors
        from pyggml.cluster.run import batch_on

        with RayActors(ray) as actors:
            options.update({"workers": workers, "stages": stages, "ram": run.ram, "prepare": adapters.apply})
            options.update({"n_threads": run.threads, "flash_attn": run.flash_attn})
            yield lambda todo: batch_on(actors, run.model, todo, n_predict, **options)

    n_errors, n_tokens = 0, 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with RequestFile(requests, results) as file:
        had = file.n_done
        if had < file.n_requests:
            with (
                answers() as answer,
                Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json) as progress,
            ):
                task = progress.add_task("batch", total=file.n_requests, completed=had)
                for result in file.run(answer):
                    n_errors += "error" in result
                    n_tokens += result.get("n_predicted", 0)
                    elapsed = progress.tasks[0].elapsed or 0.0
                    rate = f"{n_tokens / elapsed:.1f} tokens/s" if elapsed else "batch"
                    progress.update(task, description=rate, completed=file.n_done)
    about = {"requests": file.n_requests, "resumed_at": had, "errors": n_errors, "n_predicted": n_tokens}
    if as_json:
        print(json.dumps(about))
        return
    before = f" ({had} were there)" if had else ""
    print(f"{file.n_done} results{before}, {n_errors} errors, {n_tokens} tokens -> {results}", file=sys.stderr)
