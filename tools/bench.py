"""`pyggml bench`: tokens per second of prompt processing and of generation, as llama-bench defines them."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import click
from rich.console import Console
from rich.table import Table

from pyggml.bars import Show, bar
from pyggml.inspect.profile import Profile, time_line

from .adapters import Adapters
from .command import Option
from .measure.bench_history import append_history
from .measure.llama_bench import tokens_per_second
from .options import Json
from .outputs import not_the_model, print_json
from .plain import for_rich
from .running import Run


def tokens(n: int, first: int, n_vocab: int) -> list[int]:
    """`n` token ids that depend only on their position: this needs no sampling and no tokenizer."""
    return [(i * 7919 + first * 31) % n_vocab for i in range(n)]


def measure(runs: Sequence[Callable[[], float]], repetitions: int, show: Show) -> list[list[float]]:
    """For each of `runs` the tokens per second of each repetition. They take turns, after a first run of the first one
    that is not counted."""
    samples: list[list[float]] = [[] for _ in runs]
    show(0, repetitions + 1)
    runs[0]()
    for i in range(repetitions):
        show(i + 1, repetitions + 1)
        for found, run in zip(samples, runs, strict=True):
            found.append(run())
    return samples


def bench(
    adapters: Adapters,
    run: Run,
    n_prompt: Annotated[int, Option("-p", "--n-prompt", help="Prompt tokens; 0 skips the test.", min=0)] = 512,
    n_gen: Annotated[int, Option("-n", "--n-gen", help="Generated tokens; 0 skips the test.", min=0)] = 128,
    n_depth: Annotated[int, Option("-d", "--n-depth", help="Tokens in the cache before a test.", min=0)] = 0,
    repetitions: Annotated[int, Option("-r", "--repetitions", help="Repetitions.", min=1)] = 5,
    against: Annotated[
        Optional[Path],
        Option(
            "--against",
            help="Run this llama-bench (llama.cpp's, or a fork's) in turns, and print ratios of the medians.",
            metavar="PROGRAM",
        ),
    ] = None,
    history: Annotated[
        Optional[Path],
        Option("--history", help="Append the results, with commit and CPU, to this JSONL file.", metavar="FILE"),
    ] = None,
    profile: Annotated[bool, Option("--profile", help="Then one run step by step: where the time goes.")] = False,
    trace_json: Annotated[
        Optional[Path],
        Option("--trace-json", help="... and its time line, for Perfetto.", metavar="FILE"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure tokens per second; nothing is sampled in the timed part."""
    not_the_model(run.model, history, trace_json)
    context = run.context()
    m = run.load()
    if m.repacking is not None:
        m.repacking.finish()
    adapters.apply(m)
    n_batch = run.batch_size or max(n_prompt, 32)
    n_ubatch = min(run.ubatch_size, n_batch)
    context |= {"n_batch": n_batch, "n_ubatch": n_ubatch}
    ctx = m.new_context(n_depth + max(n_prompt, n_gen) + 8, **context)
    n_vocab = m.hparams.n_vocab
    encodes = m.architecture.encode is not None  # then pp measures the encoder, and tg the answer to a short text
    if encodes and n_depth:
        raise click.BadParameter("--n-depth is not for an encoder-decoder")

    def pp() -> float:
        ctx.memory.seq_rm(0, n_depth)
        ids = tokens(n_prompt, 0, n_vocab)
        start = time.perf_counter()
        if encodes:
            ctx.encode(ids)
        for i in () if encodes else range(0, n_prompt, n_batch):
            ctx.decode(ids[i : i + n_batch])
        return n_prompt / (time.perf_counter() - start)

    def tg() -> float:
        ctx.memory.seq_rm(0, n_depth)
        if encodes:
            ctx.encode(tokens(8, 0, n_vocab))
        start = time.perf_counter()
        for i in range(n_gen):
            ctx.decode(tokens(1, i, n_vocab))
        return n_gen / (time.perf_counter() - start)

    theirs = [
        *("-m", m.path, "-t", str(ctx.n_threads), "-b", str(n_batch), "-ub", str(n_ubatch)),
        *("-ctk", run.cache_type_k.lower(), "-ctv", run.cache_type_v.lower()),
        *(("-d", str(n_depth)) if n_depth else ()),  # which forks may lack
        *(() if run.flash_attn == "auto" else ("-fa", str(int(run.flash_attn == "on")))),
    ]
    depth = tokens(n_depth, 1, n_vocab)
    for i in range(0, n_depth, n_batch):
        ctx.decode(depth[i : i + n_batch])
    rows: list[dict[str, Any]] = []
    profiles: dict[str, Profile] = {}
    at = f"@d{n_depth}" if n_depth else ""
    for name, n, test in ((f"pp{n_prompt}{at}", n_prompt, pp), (f"tg{n_gen}{at}", n_gen, tg)):
        if n:
            runs = [test]
            if against is not None:
                asked = [*theirs, "-p", str(n_prompt if test is pp else 0), "-n", str(n_gen if test is tg else 0)]
                runs.append(partial(tokens_per_second, against, asked))
            with bar(name) as show:
                samples, *others = measure(runs, repetitions, show)
            row = {"test": name, "n_threads": ctx.n_threads, "samples_ts": samples, "avg_ts": statistics.fmean(samples)}
            for other in others:
                ratio = statistics.median(samples) / statistics.median(other)
                row |= {"against_samples_ts": other, "against_ratio": ratio}
            rows.append(row)
            if profile or trace_json is not None:
                with Profile(ctx.scheduler) as p:
                    test()
                profiles[name] = p
    if history is not None:
        append_history(history, m, rows)
    if trace_json is not None:
        trace_json.write_text(json.dumps(time_line(profiles.values())))
    if as_json:
        for r in rows if profile else ():
            p = profiles[r["test"]]
            r["profile"] = {by: [vars(x) for x in p.table(by)] for by in ("op", "layer")} | {"idle": p.idle}
        print_json(rows)
        return
    table = Table("test", "threads", "tokens/s", "median", "spread", title=for_rich(m.path))
    if against is not None:
        table.add_column("theirs")
        table.add_column("ratio")
    for r in rows:
        s = r["samples_ts"]
        cells = [f"{r['avg_ts']:.1f}", f"{statistics.median(s):.1f}", f"{min(s):.1f}..{max(s):.1f}"]
        if against is not None:
            cells += [f"{statistics.median(r['against_samples_ts']):.1f}", f"{r['against_ratio']:.2f}"]
        table.add_row(r["test"], str(r["n_threads"]), *cells)
    console = Console()
    console.print(table)
    for name, p in profiles.items() if profile else ():
        for by in ("op", "layer"):
            console.print(_profile_table(name, p, by))
        console.print(f"threads idle: {p.idle:.1%}")


def _profile_table(name: str, p: Profile, by: Literal["op", "layer"]) -> Table:
    table = Table(by, "steps", "ms", "share", "GB/s", "GFLOPS", title=f"{name}, by {by}")
    total = sum(r.ns for r in p.table(by))
    for r in p.table(by):
        cells = f"{r.ns / 1e6:.2f}", f"{r.ns / total:.1%}", f"{r.gb_per_s:.1f}", f"{r.gflops:.1f}"
        table.add_row(r.key or "(none)", str(r.n), *cells)
    return table
