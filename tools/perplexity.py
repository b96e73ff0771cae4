"""`pyggml perplexity`: how well a model predicts a text, how much it differs from another model, how many tasks of
multiple choice it gets right; computed as llama.cpp does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import click
import numpy as np

from pyggml.bars import bar
from pyggml.errors import BatchError
from pyggml.llm.evaluate.choices import Score, Task, choice_tasks, chosen_tasks, hellaswag_tasks, score
from pyggml.llm.evaluate.divergence import Divergence, Doubles, Uncertain, divergence, mean
from pyggml.llm.evaluate.logits_file import LogitsFile
from pyggml.llm.evaluate.perplexity import Perplexity, perplexity
from pyggml.llm.model import Model
from pyggml.llm.options import ContextOptions

from .adapters import AdapterOptions, Adapters
from .command import Option
from .options import Json, usage
from .outputs import print_json
from .prompt_text import read_bytes
from .running import Run, RunOptions

_KLD = (99.9, 99, 95, 90, 50, 10, 5, 1, 0.1)  # percentiles
_P = (99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1)


def perplexity_of_file(
    adapters: Adapters,
    run: Run,
    file: Annotated[
        Optional[Path], Option("-f", "--file", help="The text, or the tasks; -: from stdin.", metavar="FILE")
    ] = None,
    ctx_size: Annotated[int, Option("-c", "--ctx-size", help="Tokens of a chunk (3 on); 0: as trained.", min=0)] = 512,
    ppl_stride: Annotated[
        int, Option("--ppl-stride", help="Tokens from chunk to chunk; 0: chunks side by side.", min=0)
    ] = 0,
    chunks: Annotated[int, Option("--chunks", help="Chunks to evaluate; -1: all.", min=-1)] = -1,
    base: Annotated[
        Optional[Path],
        Option(
            *("--kl-divergence-base", "--save-all-logits"),
            help="File of all log-probabilities: written, or read with --kl-divergence.",
            metavar="FILE",
        ),
    ] = None,
    kl_divergence: Annotated[
        bool, Option("--kl-divergence", help="How far the model is from the one that wrote the base file.")
    ] = False,
    hellaswag: Annotated[bool, Option("--hellaswag", help="Score HellaSwag tasks, six lines each.")] = False,
    hellaswag_n: Annotated[int, Option("--hellaswag-tasks", help="... so many; 0: all.", min=0)] = 400,
    multiple_choice: Annotated[
        bool, Option("--multiple-choice", help="Score the multiple-choice tasks of a binary file.")
    ] = False,
    multiple_choice_n: Annotated[int, Option("--multiple-choice-tasks", help="... so many; 0: all.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Measure the perplexity of a text, with its standard error. The text is cut into chunks, and the second half of
    each is predicted; with --ppl-stride chunks overlap, and the last tokens of each are predicted. Or measure how much
    two models differ: first run the base with --kl-divergence-base FILE, then the other model with --kl-divergence,
    too. Or count how many tasks of multiple choice a model gets right. Progress goes to stderr."""
    if kl_divergence + hellaswag + multiple_choice > 1:
        raise click.BadParameter("one of --kl-divergence, --hellaswag and --multiple-choice")
    if kl_divergence:
        if base is None:
            raise click.BadParameter("--kl-divergence needs --kl-divergence-base")
        saved = LogitsFile(base)
        show_divergence(_loaded(run, adapters), saved, run.context(), as_json)
        return
    if 0 < ctx_size < 3 or 0 < ctx_size <= ppl_stride:
        raise click.BadParameter(f"chunks of {ctx_size} tokens: they have 3 at least, and more than --ppl-stride")
    if chunks == 0:
        raise click.BadParameter("--chunks 0 would measure nothing; -1 takes all")
    if file is None:
        raise click.BadParameter("-f is missing")
    data = read_bytes(file)
    context = run.context()
    if hellaswag or multiple_choice:
        with usage():
            tasks = hellaswag_tasks(data.decode("utf-8", "replace")) if hellaswag else choice_tasks(data)
        some = chosen_tasks(tasks, hellaswag_n if hellaswag else multiple_choice_n)
        show_choices(_loaded(run, adapters), some, ctx_size, context, as_json)
        return
    m = _loaded(run, adapters)
    text = data.decode("utf-8", "replace")
    last: Perplexity | None = None
    with bar("perplexity") as show:
        for last in perplexity(m, text, ctx_size, ppl_stride, chunks, context=context, save_logits=base):
            show(last.n_done, last.n_chunks, f"PPL = {_shown(last)}")
    assert last is not None
    if as_json:
        out = {"ppl": last.ppl, "error": last.error, "nll": last.nll}
        out |= {"n_ctx": ctx_size or m.hparams.n_ctx_train, "stride": ppl_stride}
        print_json(out | {"n_chunks": last.n_chunks, "n_scored": last.n_scored})
    else:
        print(f"Final estimate: PPL = {_shown(last)}")


def _loaded(run: RunOptions, adapters: AdapterOptions) -> Model:
    m = run.load()
    adapters.apply(m)
    return m


def _shown(p: Perplexity) -> str:
    return f"{p.ppl:.4f} +/- {p.error:.5f}"


def show_divergence(model: Model, base: LogitsFile, context: ContextOptions, as_json: bool) -> None:
    """Show the divergence, a line for each chunk, and its statistics at the end; or one JSON object."""
    last: Divergence | None = None
    if not as_json:
        print(f"chunk{'PPL':>16}{'ln(PPL(Q)/PPL(base))':>34}{'KL Divergence':>23}{'Δp RMS':>22}{'Same top p':>22}")
    with bar("KL divergence") as show:
        for last in divergence(model, base, context):
            show(last.n_done, last.n_chunks)
            if not as_json:
                rows = (last.ppl, "9.4f"), (last.log_ratio, "10.5f"), (mean(last.kld), "10.5f")
                shown = [f"{x.value:{form}} ± {x.error:{form}}" for x, form in rows]
                shown += [f"{100 * x.value:6.3f} ± {100 * x.error:6.3f} %" for x in (last.p_rms, last.top)]
                print(f"{last.n_done:4d}    " + "    ".join(shown), flush=True)
    assert last is not None
    if as_json:
        print_json(_divergence_json(last))
    else:
        print("\n".join(("", *_perplexity_lines(last), "", *_kld_lines(last), "", *_p_lines(last))))


def _perplexity_lines(d: Divergence) -> list[str]:
    def line(what: str, x: Uncertain) -> str:
        return f"{what:<30}: {x.value:10.6f} ± {x.error:10.6f}"

    return [
        "====== Perplexity statistics ======",
        line("Mean PPL(Q)", d.ppl),
        line("Mean PPL(base)", d.ppl_base),
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * d.correlation:6.2f}%",
        line("Mean ln(PPL(Q)/PPL(base))", d.log_ratio),
        line("Mean PPL(Q)/PPL(base)", d.ratio),
        line("Mean PPL(Q)-PPL(base)", d.difference),
    ]


def _kld_lines(d: Divergence) -> list[str]:
    x = mean(d.kld)
    lines = ["====== KL divergence statistics ======", f"Mean    KLD: {x.value:10.6f} ± {x.error:10.6f}"]
    return lines + [f"{name} KLD: {value:10.6f}" for name, value in _percentiles(d.kld, _KLD)]


def _p_lines(d: Divergence) -> list[str]:
    x = mean(d.p_diff)
    lines = ["====== Token probability statistics ======", f"Mean    Δp: {100 * x.value:6.3f} ± {100 * x.error:5.3f} %"]
    lines += [f"{name} Δp: {100 * value:6.3f}%" for name, value in _percentiles(d.p_diff, _P)]
    lines.append(f"RMS Δp    : {100 * d.p_rms.value:6.3f} ± {100 * d.p_rms.error:5.3f} %")
    return [*lines, f"Same top p: {100 * d.top.value:6.3f} ± {100 * d.top.error:5.3f} %"]


def _percentiles(values: Doubles, which: tuple[float, ...]) -> list[tuple[str, float]]:
    """Percentiles by llama.cpp's names, from the largest to the least."""
    names = {50: "Median "} | {p: f"{p:4.1f}%  " for p in which if p != 50}
    found = [("Maximum", float(values.max()))]
    found += [(names[p], float(np.percentile(values, p))) for p in which]
    return [*found, ("Minimum", float(values.min()))]


def _divergence_json(d: Divergence) -> dict[str, Any]:
    pairs = {
        "ppl": d.ppl,
        "ppl_base": d.ppl_base,
        "ln_ppl_ratio": d.log_ratio,
        "ppl_ratio": d.ratio,
        "ppl_difference": d.difference,
        "kld": mean(d.kld),
        "p_diff": mean(d.p_diff),
        "p_diff_rms": d.p_rms,
        "same_top": d.top,
    }
    out: dict[str, Any] = {name: x._asdict() for name, x in pairs.items()}
    out["correlation"], out["n_scored"], out["n_chunks"] = d.correlation, len(d.kld), d.n_chunks
    for name, values, which in (("kld", d.kld, _KLD), ("p_diff", d.p_diff, _P)):
        out[f"{name}_percentiles"] = {p: float(np.percentile(values, p)) for p in (0, *which, 100)}
    return out


def show_choices(model: Model, tasks: list[Task], n_ctx: int, context: ContextOptions, as_json: bool) -> None:
    """Show how many of the tasks the model gets right."""
    last: Score | None = None
    with bar("tasks") as show, usage(BatchError):
        for last in score(model, tasks, n_ctx, context):
            show(last.n_done, last.n_tasks, f"{100 * last.share:.2f} %")
    assert last is not None
    low, high = last.interval
    if as_json:
        out = {"share": last.share, "error": last.error, "interval": [low, high], "chance": last.chance}
        print_json(out | {"n_tasks": last.n_tasks, "n_right": last.n_right})
        return
    print(f"Final result: {100 * last.share:.4f} +/- {100 * last.error:.4f} ({last.n_right} of {last.n_tasks} tasks)")
    print(f"95 % interval: [{100 * low:.4f}, {100 * high:.4f}]; random chance: {100 * last.chance:.4f}")
