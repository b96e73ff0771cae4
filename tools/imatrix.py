"""`pyggml imatrix`: measure which columns of a model's weights matter, for `pyggml quantize --imatrix`."""

from __future__ import annotations

import re
import sys
from math import log2, sqrt
from pathlib import Path
from typing import Annotated, Literal, Optional

import click
import numpy as np

from pyggml.bars import bar
from pyggml.llm.evaluate.imatrix import measure_imatrix
from pyggml.llm.quantize.imatrix import Doubles, ImatrixSums, load_sums, save_dat, save_sums

from .adapters import Adapters
from .command import Option
from .exits import INTERRUPTED
from .outputs import not_the_model
from .plain import plain
from .prompt_text import read_bytes
from .running import Run

_LAYER = re.compile(r"blk\.(\d+)\.")
_ACTIVE = 1e-5  # mean squares above count as active


def imatrix(
    adapters: Adapters,
    run: Run,
    file: Annotated[Optional[Path], Option("-f", "--file", help="The text; -: from stdin.")] = None,
    output: Annotated[
        Path, Option("-o", "--output", "--output-file", help="The file to write.", metavar="FILE")
    ] = Path("imatrix.gguf"),
    in_files: Annotated[
        Optional[list[Path]],
        Option("--in-file", help="Go on from what this file holds (repeatable: merged).", metavar="FILE"),
    ] = None,
    output_format: Annotated[
        Literal["gguf", "dat"], Option("--output-format", help="gguf, or dat for older readers.")
    ] = "gguf",
    ctx_size: Annotated[int, Option("-c", "--ctx-size", help="Tokens of a chunk.", min=3)] = 512,
    chunks: Annotated[int, Option("--chunks", help="Chunks to evaluate; -1: all.", min=-1)] = -1,
    from_chunk: Annotated[int, Option("--chunk", "--from-chunk", help="Leave out the first N.", min=0)] = 0,
    output_frequency: Annotated[int, Option("-ofreq", "--output-frequency", help="Write every N chunks.", min=1)] = 10,
    save_frequency: Annotated[
        int, Option("--save-frequency", help="Write a copy, FILE.at_N, every N chunks; 0: none.", min=0)
    ] = 0,
    process_output: Annotated[bool, Option("--process-output", help="Measure output.weight, too.")] = False,
    ppl: Annotated[bool, Option("--ppl/--no-ppl", help="Show the perplexity of the text.")] = True,
    parse_special: Annotated[bool, Option("--parse-special", help="Read the names of control tokens.")] = False,
    show_statistics: Annotated[
        bool, Option("--show-statistics", help="Show what --in-file holds, and measure nothing.")
    ] = False,
) -> None:
    """Measure an importance matrix on a text: for each column of the weights, the mean square of what it is multiplied
    with; each expert separately. Without a text, merge files. Ctrl-C ends it and keeps what was measured."""
    sums = ImatrixSums(ctx_size)
    for path in in_files or ():
        sums.merge(load_sums(path, ctx_size))
    if show_statistics:
        if not in_files:
            raise click.BadParameter("--show-statistics needs --in-file")
        print(plain(statistics(sums)))
        return
    if chunks == 0:
        raise click.BadParameter("--chunks 0 would measure nothing; -1 takes all")
    if file is None and not in_files:
        raise click.BadParameter("give a text with -f, or files to merge with --in-file")

    def save(path: Path) -> None:
        (save_dat if output_format == "dat" else save_sums)(path, sums)

    done = False
    if file is not None:
        data = read_bytes(file)
        context = run.context()
        not_the_model(run.model, output)
        m = run.load()
        adapters.apply(m)
        sums.datasets.append(str(file))
        measured = measure_imatrix(
            m,
            data.decode("utf-8", "replace"),
            sums,
            chunks,
            from_chunk,
            parse_special=parse_special,
            process_output=process_output,
            with_perplexity=ppl,
            context=context,
        )
        estimate = ""
        try:
            with bar("imatrix") as show:
                for step in measured:
                    if step.perplexity is not None:
                        estimate = f"PPL = {step.perplexity.ppl:.4f} +/- {step.perplexity.error:.5f}"
                    show(step.n_done, step.n_chunks, estimate or "imatrix")
                    if step.n_done % output_frequency == 0:
                        save(output)
                    if save_frequency and step.n_done % save_frequency == 0:
                        save(Path(f"{output}.at_{step.n_done}"))
        except KeyboardInterrupt:
            done = True
            if not sums.sums:
                raise
        if estimate:
            print(f"Final estimate: {estimate}")
    for name, share in sums.partial().items():
        print(f"warning: {plain(name)} has partial data ({share:.2%})", file=sys.stderr)
    save(output)
    print(f"{output}: {len(sums.sums)} tensors, {sums.n_chunks} chunks")
    if done:
        raise click.exceptions.Exit(INTERRUPTED)


def statistics(sums: ImatrixSums) -> str:
    """A line for each tensor, as llama.cpp's tool shows them: by kind, tensors with the largest inputs first."""
    rows: list[tuple[str, float, str]] = []
    for name in sums.sums:
        counts = sums.counts[name]
        if not counts.any():
            continue
        x = (sums.sums[name] / np.maximum(counts, 1)[:, None])[counts > 0].reshape(-1)
        total, mean, deviation = float(x.sum()), float(x.mean()), float(x.std())
        p = x[x > 0] / total if total > 0 else np.ones(1)
        entropy = float(-(p * np.log2(p)).sum())
        z = float((x > mean + deviation).mean()) if deviation > 0 else 0.0
        found = _LAYER.search(name)
        before = (
            None
            if found is None
            else sums.sums.get(f"{name[: found.start(1)]}{int(found[1]) - 1}{name[found.end(1) :]}")
        )
        layer, kind = ("-" if found is None else found[1]), name.removesuffix(".weight").rpartition(".")[2]
        cells = [f"{total:14.2f}", f"{x.min():10.4f}", f"{x.max():12.4f}", f"{mean:9.2f}", f"{deviation:9.2f}"]
        cells += [f"{(x > _ACTIVE).mean():9.2%}", f"{x.size:8d}", f"{entropy:10.4f}"]
        cells += [
            f"{entropy / log2(x.size) if x.size > 1 else 0.0:9.2%}",
            f"{z:8.2%}",
            f"{_cosine(sums.sums[name], before):8.4f}",
        ]
        rows.append((kind, -total, f"{layer:>5} {kind:<20}" + "".join(cells)))
    head = f"{'layer':>5} {'tensor':<20}{'sum of squares':>14}{'min':>10}{'max':>12}{'mean':>9}{'deviation':>9}"
    head += f"{'active':>9}{'N':>8}{'entropy':>10}{'(norm)':>9}{'ZD':>8}{'CosSim':>8}"
    return "\n".join([head, *(text for _, _, text in sorted(rows))])


def _cosine(a: Doubles, b: Doubles | None) -> float:
    """The cosine of a tensor's inputs and the inputs of the same tensor in the layer before."""
    if b is None or a.size != b.size:
        return 0.0
    x, y = a.reshape(-1), b.reshape(-1)
    norm = sqrt(float(np.vdot(x, x)) * float(np.vdot(y, y)))
    return float(np.vdot(x, y)) / norm if norm > 0 else 0.0
