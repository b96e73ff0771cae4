"""`pyggml cvector`: a control vector from prompts that show a trait and prompts that show its opposite."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import click
import numpy as np
import numpy.typing as npt

from pyggml.errors import ModelError
from pyggml.llm.adapters.control import ControlVector
from pyggml.llm.batch import Batch
from pyggml.llm.model import Model, load_model

from .command import Option
from .options import ModelPath, Ram, Threads
from .outputs import not_the_model
from .prompt_text import read_bytes
from .split import progress_of

Matrix = npt.NDArray[np.float64]

_ITERATIONS, _TOLERANCE = 1000, 1e-7  # when the power iteration ends, as in llama.cpp
_SAME = 1e-6  # smaller differences come from equal tokens
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\"}


Method = Literal["pca", "mean"]  # how many differences become one direction


def cvector(
    positive: Annotated[Path, Option("--positive-file", help="Prompts with the trait, one per line.")],
    negative: Annotated[Path, Option("--negative-file", help="Prompts without: line by line the opposite.")],
    model: ModelPath = None,
    ram: Ram = None,
    method: Annotated[Method, Option("--method", help="First principal component, or mean.")] = "pca",
    out: Annotated[Path, Option("-o", "--output", help="GGUF file to write.")] = Path("control_vector.gguf"),
    threads: Threads = None,
) -> None:
    """Make a control vector, as llama.cpp's cvector-generator does: what distinguishes the outputs of each layer for
    pairs of prompts. In prompts \\n, \\t and \\\\ are what they stand for."""
    texts = [_lines(positive), _lines(negative)]
    if len(texts[0]) != len(texts[1]) or not texts[0]:
        counts = f"{positive} has {len(texts[0])}, {negative} {len(texts[1])}"
        raise click.BadParameter(f"prompts come in pairs, one at least: {counts}")
    not_the_model(model, out)
    with load_model(model, ram=ram) as m:
        vector = directions(m, texts[0], texts[1], method, threads)
        vector.save(out, m.arch)
    print(f"{out}: {len(vector.directions)} directions from {len(texts[0])} pairs ({method})")


def directions(
    model: Model, positive: Sequence[str], negative: Sequence[str], method: Method, n_threads: int | None = None
) -> ControlVector:
    """The direction of each layer from 1 on, with length 1, pointing to the positive prompts. For the tokens of each
    pair of prompts the differences between the layer's outputs are taken; the direction is their mean, or their first
    principal component (about zero). The shorter prompt of a pair is filled up with spaces.

    Raises ModelError when a layer shows no difference.
    """
    tokens = [_pair(model, p, n) for p, n in zip(positive, negative, strict=True)]
    longest = max(len(p) for p, _ in tokens)
    names = {il: f"l_out-{il}" for il in range(1, model.hparams.n_layer)}
    rows: dict[int, list[Matrix]] = {il: [] for il in names}
    with (
        model.new_context(longest, n_batch=longest, n_ubatch=longest, n_threads=n_threads) as ctx,
        model.tap(*names.values()) as tap,
        progress_of("cvector") as told,
    ):
        for i, pair in enumerate(tokens):
            for ids in pair:
                batch = Batch.prompt(ids)
                batch.logits = [True] * len(ids)  # otherwise the last layer would give one row only
                ctx.memory.clear()
                ctx.decode(batch)
            if len(tap) < len(names):
                raise ModelError(f"{model.arch} has no control vectors: its layers have no nodes of the name l_out")
            for il, name in names.items():
                a, b = (np.asarray(x, np.float64) for x in tap[name])
                rows[il].append((a - b)[np.abs(a - b).max(axis=1) > _SAME])
            tap.clear()
            told(i + 1, len(tokens))
    return ControlVector({il: _direction(np.concatenate(r), il, method) for il, r in rows.items()})


def _direction(differences: Matrix, il: int, method: Method) -> Matrix:
    mean = differences.sum(axis=0)
    if not mean.any():
        raise ModelError(f"layer {il} gives the same for positive and negative prompts")
    v: Matrix = mean / np.linalg.norm(mean)
    for _ in range(_ITERATIONS if method == "pca" else 0):  # start from the mean, which decides the sign
        u: Matrix = np.matmul(np.matmul(differences, v), differences)
        u = u / np.linalg.norm(u)
        moved = float(np.linalg.norm(u - v))
        v = u
        if moved < _TOLERANCE:
            break
    return v


def _pair(model: Model, positive: str, negative: str) -> tuple[list[int], list[int]]:
    """The tokens of both prompts, filled up to the same number."""
    p, n = (model.tokenize(text, parse_special=True) for text in (positive, negative))
    space = model.tokenize(" ", add_special=False)[-1:]
    length = max(len(p), len(n))
    return p + space * (length - len(p)), n + space * (length - len(n))


def _lines(path: Path) -> list[str]:
    lines = read_bytes(path).decode("utf-8", "replace").splitlines()
    return [re.sub(r"\\([nt\\])", lambda found: _ESCAPES[found[1]], line) for line in lines if line]
