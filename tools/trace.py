"""`pyggml trace` and `pyggml diff`: keep the values inside a run, and find the first node that differs between two
runs."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Optional

import click
from rich.console import Console
from rich.table import Table

from pyggml.backends.cpu import CpuBackend
from pyggml.backends.protocol import new_backend
from pyggml.errors import BackendError, DTypeError, ModelError
from pyggml.inspect import trace as traces
from pyggml.llm.model import Model, default_model_path, load_model
from pyggml.llm.options import ContextOptions
from pyggml.llm.quantize.mixes import find_mix
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from .command import Argument, Option
from .options import FlashAttn, Json, ModelPath, Ram, Threads, usage
from .outputs import not_the_model, print_json
from .plain import for_rich
from .running import cache_type

Nodes = Annotated[
    Optional[list[str]],
    Option("--nodes", help="Nodes whose names match (repeatable); default: all.", metavar="PATTERN"),
]
Prompt = Annotated[Optional[str], Option("-p", "--prompt", help="The text to evaluate.")]
_KEYS = ("backend", "isa", "type_k", "type_v", "flash_attn", "repack", "quantize")
_SIDE = (
    "A model file, or a trace (.npz). How a model runs may follow it as :KEY=VALUE,KEY=VALUE "
    f"(m.gguf:quantize=Q4_K_M, m.gguf:isa=avx2,type_k=Q8_0); keys: {', '.join(_KEYS)}. "
    "Without a file, the model that ships with the package."
)
_DIFFERENT = 3  # the exit code; 1 and 2 are failures


def trace(
    out: Annotated[Path, Option("-o", "--output", help="The file to write.", metavar="FILE.npz")],
    prompt: Annotated[str, Option("-p", "--prompt", help="The text to evaluate.")],
    model: ModelPath = None,
    ram: Ram = None,
    nodes: Nodes = None,
    threads: Threads = None,
    flash_attn: FlashAttn = False,
) -> None:
    """Evaluate a text and keep the values of the graph's nodes (`dump-dot` shows their names) in an .npz file."""
    not_the_model(model, out)
    t = traces.trace(load_model(model, ram=ram), prompt, *(nodes or ()), n_threads=threads, flash_attn=flash_attn)
    traces.save_trace(t, out)
    print(f"{len(t.arrays)} nodes of {len(t.about['tokens'])} tokens -> {out}")


def diff(
    a: Annotated[str, Argument(help=_SIDE, metavar="A")],
    b: Annotated[str, Argument(help="What it is compared with, likewise.", metavar="B")],
    prompt: Prompt = None,
    nodes: Nodes = None,
    tolerance: Annotated[float, Option("--tolerance", help="NMSE up to which nodes count as equal.", min=0)] = 1e-6,
    as_json: Json = False,
) -> None:
    """Run the same tokens twice, or read traces, and show the first node that differs, and how the difference grows
    from layer to layer; a side with quantize=Q4_K_M is quantized first. The exit code is 0 when all nodes are within
    the tolerance, else 3."""
    (left, options_a), (right, options_b) = _side(a), _side(b)
    d = traces.diff(left, right, prompt, *(nodes or ()), tolerance=tolerance, options_a=options_a, options_b=options_b)
    if as_json:
        print_json(traces.summary(d))
    else:
        _show(d)
    if d.first is not None:
        raise click.exceptions.Exit(_DIFFERENT)


def _side(text: str) -> tuple[Model | traces.Trace, ContextOptions]:
    """`FILE` or `FILE:KEY=VALUE,..`."""
    found = re.fullmatch(r"(.*?)(?::((?:\w+=[^,=]*)(?:,\w+=[^,=]*)*))?", text, re.DOTALL)
    assert found is not None
    path, given = found[1], dict(pair.split("=") for pair in found[2].split(",")) if found[2] else {}
    if path.endswith(".npz"):
        if given:
            raise click.BadParameter(f"{text}: a trace has been computed; it takes no {', '.join(given)}")
        return traces.load_trace(path), {}
    with usage(DTypeError, ModelError, BackendError):
        repack, file_type = _flag(given.pop("repack", "1")), given.pop("quantize", None)
        if file_type is not None:
            find_mix(file_type)
        options = {key: _option(key, value) for key, value in given.items()}
        if isa := options.pop("isa", None):
            options["backend"] = isa
    if file_type is None:
        return load_model(path or None, repack=repack), options  # pyright: ignore[reportReturnType]
    with TemporaryDirectory() as folder:  # the file is deleted with the folder, but stays mapped
        plan = plan_quantization(path or default_model_path(), file_type, allow_requantize=True)
        model = load_model(write_quantized(plan, Path(folder) / "model.gguf")[0], repack=repack)
        return model, options  # pyright: ignore[reportReturnType]


def _option(key: str, value: str) -> Any:
    if key == "isa":
        return [CpuBackend(isa=value)]
    if key in ("type_k", "type_v"):
        return cache_type(key, value)
    if key == "flash_attn":
        return _flag(value)
    if key == "backend":
        new_backend(value)
        return value
    raise ModelError(f"{key} is none of {', '.join(_KEYS)}")


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ModelError(f"a flag is 0 or 1, not {text!r}")
    return text == "1"


def _show(d: traces.Diff) -> None:
    first, console = d.first, Console()
    for names, side in ((d.only_a, "A"), (d.only_b, "B")):
        if names:
            console.print(
                f"only {side} has {len(names)} nodes: {for_rich(', '.join(names[:5]))}{' ..' * (len(names) > 5)}"
            )
    table = Table("node", "NMSE", "largest difference", box=None)
    last = [n for n in d.nodes if n.name in ("result_norm", "result_output")]
    for n in (*d.layers(), *last):
        table.add_row(for_rich(n.name), f"{n.nmse:.3g}", n.note or f"{n.max_abs:.3g}")
    console.print(table)
    if first is None:
        console.print(f"equal: {len(d.nodes)} nodes within an NMSE of {d.tolerance:g}")
    else:
        how = first.note or f"NMSE {first.nmse:.3g}, largest difference {first.max_abs:.3g}"
        console.print(f"first beyond {d.tolerance:g}: [bold]{for_rich(first.name)}[/bold] ({how})")
