"""`pyggml finetune` and `pyggml train`: train an adapter of a model, or all of its weights, on texts."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Optional

import click

from pyggml.bars import bar
from pyggml.errors import ModelError
from pyggml.learn.lora import LoRA
from pyggml.learn.optimisers import AdamW, schedule
from pyggml.learn.saved import check_output
from pyggml.learn.texts_file import Batches, Example, read_examples
from pyggml.learn.trainer import Trainer
from pyggml.llm.model import load_model

from .command import Argument, Group, Option
from .options import ModelPath, Threads

_PANEL = "Training"


@dataclass(frozen=True)
class TrainOptions:
    """What both verbs take."""

    ctx_size: Annotated[
        int, Option("-c", "--ctx-size", panel=_PANEL, help="Tokens of a text, at most: longer ones are cut.", min=2)
    ] = 512
    batch_size: Annotated[int, Option("-b", "--batch-size", panel=_PANEL, help="Texts of a step.", min=1)] = 4
    epochs: Annotated[float, Option("--epochs", panel=_PANEL, help="How often all texts are seen.", above=0)] = 1.0
    steps: Annotated[
        Optional[int], Option("--steps", panel=_PANEL, help="Steps in all (instead of --epochs).", min=1)
    ] = None
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        Option("--schedule", panel=_PANEL, help="How the learning rate goes on after the warm-up."),
    ] = "cosine"
    warmup: Annotated[int, Option("--warmup", panel=_PANEL, help="Steps of the warm-up.", min=0)] = 10
    weight_decay: Annotated[float, Option("--weight-decay", panel=_PANEL, help="AdamW's weight decay.", min=0)] = 0.0
    seed: Annotated[int, Option("-s", "--seed", panel=_PANEL, help="Of the order of texts, and of adapters.")] = 0
    mask_prompt: Annotated[
        bool, Option("--mask-prompt", panel=_PANEL, help="Only completions and answers count, not prompts.")
    ] = False
    pack: Annotated[bool, Option("--pack", panel=_PANEL, help="Join short texts.")] = False
    test: Annotated[
        Optional[Path], Option("--test", panel=_PANEL, help="Texts to measure the loss on, before and after.")
    ] = None
    state: Annotated[
        Optional[Path], Option("--state", panel=_PANEL, help="File to save the state in, to go on from later.")
    ] = None
    save_every: Annotated[
        int, Option("--save-every", panel=_PANEL, help="Save it each so many steps, too; 0: only at the end.", min=0)
    ] = 0
    resume: Annotated[
        Optional[Path], Option("--resume", panel=_PANEL, help="Go on from a saved state, with the same options.")
    ] = None


Train = Annotated[TrainOptions, Group.of(TrainOptions)]
Data = Annotated[Path, Argument(metavar="DATA", help="Texts: JSON lines (.jsonl), or plain text.")]
Out = Annotated[
    Path,
    Option("-o", "--output", help="What to write: NAME.gguf, or a folder (PEFT's, a model's).", metavar="OUT"),
]


def finetune(
    data: Data,
    how: Train,
    model: ModelPath = None,
    threads: Threads = None,
    out: Out = Path("adapter.gguf"),
    rank: Annotated[int, Option("-r", "--rank", help="The adapter's rank.", min=1)] = 8,
    alpha: Annotated[float, Option("--alpha", help="... and factor, times the rank.", above=0)] = 16.0,
    targets: Annotated[
        str, Option("--targets", help="Weights to adapt: roles or patterns of GGUF names, joined by commas.")
    ] = "attn_q,attn_v",
    lr: Annotated[float, Option("--lr", help="The learning rate.", above=0)] = 1e-4,
) -> None:
    """Train a LoRA adapter on texts. The model's weights stay as they are stored, in any type. Lines of a .jsonl file
    have `text`, or `prompt` and `completion`, or `messages`. Progress goes to stderr."""
    _run(data, how, model, threads, out, lr, LoRA(rank, alpha, tuple(targets.split(",")), seed=how.seed))


def train(
    data: Data,
    how: Train,
    model: ModelPath = None,
    threads: Threads = None,
    out: Out = Path("model.gguf"),
    lr: Annotated[float, Option("--lr", help="The learning rate.", above=0)] = 1e-5,
) -> None:
    """Train all weights of a model on texts. They must be F32, F16 or BF16 (a GGUF file, or a Hugging Face folder), and
    keep their types in the output. Progress goes to stderr."""
    _run(data, how, model, threads, out, lr, "all")


def _run(
    data: Path,
    how: TrainOptions,
    model: str | None,
    threads: int | None,
    out: Path,
    lr: float,
    what: Literal["all"] | LoRA,
) -> None:
    if how.save_every and how.state is None:
        raise click.BadParameter("--save-every needs --state FILE")
    with load_model(model) as m:
        for path in (out, how.state):  # before the training, which would be lost
            if path is not None:
                check_output(path, data, how.test, m.path)
        if how.state is not None and how.state.absolute() == out.absolute():
            raise ModelError(f"{out}: cannot be both the output and the state")
        examples = read_examples(data, m, how.ctx_size, mask_prompt=how.mask_prompt, pack=how.pack)
        held = None if how.test is None else read_examples(how.test, m, how.ctx_size, mask_prompt=how.mask_prompt)
        batches = Batches(examples, how.batch_size, how.seed)
        n_steps = how.steps or max(1, math.ceil(how.epochs * batches.n_epoch))
        opt = AdamW(schedule(lr, n_steps, how.lr_schedule, how.warmup), weight_decay=how.weight_decay)
        t = m.trainer(opt, what, how.ctx_size, threads)
        if how.resume is not None:
            t.load_state(how.resume)
        if held is not None:
            _measure(t, held, how.batch_size)
        _steps(t, batches, n_steps, how)
        if held is not None:
            _measure(t, held, how.batch_size)
        t.save(out)
    print(f"{out}: {len(t.params)} tensors after {t.n_steps} steps")


def _steps(t: Trainer, batches: Batches, n_steps: int, how: TrainOptions) -> None:
    """Make the steps that are left, and save the state."""
    start, n_tokens = time.monotonic(), 0
    try:
        with bar("training") as show:
            while t.n_steps < n_steps:
                batch = batches[t.n_steps]
                loss = t.step([e.ids for e in batch], [e.mask for e in batch])
                n_tokens += sum(len(e.ids) for e in batch)
                speed = n_tokens / max(time.monotonic() - start, 1e-9)
                show(t.n_steps, n_steps, f"loss {loss:.4f}, {speed:.0f} tokens/s")
                if t.n_steps == n_steps or t.n_steps % max(n_steps // 20, 1) == 0:
                    print(f"step {t.n_steps} of {n_steps}: loss {loss:.4f}", flush=True)
                if how.state is not None and how.save_every and t.n_steps % how.save_every == 0:
                    t.save_state(how.state)
    finally:  # also when it is interrupted: nothing that was learned is lost
        if how.state is not None and t.n_steps:
            t.save_state(how.state)


def _measure(t: Trainer, examples: Sequence[Example], n_batch: int) -> None:
    """Print the mean loss of texts, and their perplexity."""
    total, counted = 0.0, 0
    for i in range(0, len(examples), n_batch):
        batch = examples[i : i + n_batch]
        n = sum(sum(e.mask[1:]) for e in batch)
        total += n * t.loss([e.ids for e in batch], [e.mask for e in batch])
        counted += n
    print(f"test: loss {total / counted:.4f}, perplexity {math.exp(min(total / counted, 700)):.3f}", flush=True)
