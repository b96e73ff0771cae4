"""`pyggml finetune` and `pyggml train`: train an adapter of a model, or all of its weights, on texts."""

from __future__ import annotations

import math
import secrets
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Optional

import click

from pyggml.errors import ModelError
from pyggml.learn.adafactor import Adafactor
from pyggml.learn.dataset import split, steps_of
from pyggml.learn.loop import Progress
from pyggml.learn.lora import LoRA
from pyggml.learn.muon import Muon
from pyggml.learn.new_model import write_new_model
from pyggml.learn.optimisers import SGD, AdamW, AdamW8, Optimiser, schedule
from pyggml.learn.saved import check_save, output_of
from pyggml.learn.state_file import check_output
from pyggml.learn.texts_file import Example, columns, read_examples
from pyggml.learn.trainer import Trainer
from pyggml.llm.model import load_model
from pyggml.stream.sizes import memory_size

from .command import Argument, Group, Option
from .options import Config, ModelPath, Threads

_PANEL = "Training"


@dataclass(frozen=True)
class TrainOptions:
    """What both verbs take."""

    config: Config = None
    ctx_size: Annotated[
        int, Option("-c", "--ctx-size", panel=_PANEL, help="Tokens of a text, at most: longer ones are cut.", min=2)
    ] = 512
    batch_size: Annotated[int, Option("-b", "--batch-size", panel=_PANEL, help="Texts of a step.", min=1)] = 4
    ubatch_size: Annotated[
        Optional[int],
        Option("-ub", "--ubatch-size", panel=_PANEL, help="Texts computed at a time, to save memory.", min=1),
    ] = None
    epochs: Annotated[float, Option("--epochs", panel=_PANEL, help="How often all texts are seen.", above=0)] = 1.0
    steps: Annotated[
        Optional[int], Option("--steps", panel=_PANEL, help="Steps in all (instead of --epochs).", min=1)
    ] = None
    val_split: Annotated[
        float,
        Option("--val-split", panel=_PANEL, help="Part of the texts to hold back, to measure the loss on.", min=0),
    ] = 0.0
    optimizer: Annotated[
        Literal["adamw", "adamw8", "adafactor", "muon", "sgd"],
        Option("--optimizer", panel=_PANEL, help="How weights follow gradients (adamw8: states of 8 bits)."),
    ] = "adamw"
    clip: Annotated[
        Optional[float], Option("--clip", panel=_PANEL, help="Norm of all gradients, at most.", above=0)
    ] = None
    grad_checkpoint: Annotated[
        bool, Option("--grad-checkpoint", panel=_PANEL, help="Compute layers again, in place of keeping their values.")
    ] = False
    ram: Annotated[
        Optional[str],
        Option(
            "--ram",
            panel=_PANEL,
            help="Memory of a step, as 2GiB: as many layers as needed are computed again.",
            metavar="SIZE",
            check=memory_size,
        ),
    ] = None
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine"],
        Option("--schedule", panel=_PANEL, help="How the learning rate goes on after the warm-up."),
    ] = "cosine"
    warmup: Annotated[int, Option("--warmup", panel=_PANEL, help="Steps of the warm-up.", min=0)] = 10
    weight_decay: Annotated[float, Option("--weight-decay", panel=_PANEL, help="The weight decay.", min=0)] = 0.0
    seed: Annotated[
        int, Option("-s", "--seed", panel=_PANEL, min=0, help="Of the order of texts, and of new weights.")
    ] = 0
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
        int, Option("--save-every", panel=_PANEL, help="Save it each so many steps; 0: after each epoch.", min=0)
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
        str,
        Option("--targets", help="Weights to adapt: roles or patterns of GGUF names, joined by commas; or all-linear."),
    ] = "attn_q,attn_v",
    rslora: Annotated[bool, Option("--rslora", help="Divide --alpha by the root of the rank (rsLoRA).")] = False,
    dora: Annotated[bool, Option("--dora", help="Train the lengths of rows, too (DoRA). -o must be a folder.")] = False,
    lr: Annotated[float, Option("--lr", help="The learning rate.", above=0)] = 1e-4,
) -> None:
    """Train a LoRA adapter on texts. The model's weights stay as they are stored, in any type. Lines of a .jsonl file
    have `text`, or `prompt` and `completion`, or `messages`. A bar on stderr shows the progress."""
    lora = LoRA(rank, alpha, tuple(targets.split(",")), seed=how.seed, rslora=rslora, dora=dora)
    with _ended_by_sigterm():
        _run(data, how, model, threads, out, lr, lora)


def train(
    data: Data,
    how: Train,
    model: ModelPath = None,
    threads: Threads = None,
    out: Out = Path("model.gguf"),
    lr: Annotated[float, Option("--lr", help="The learning rate.", above=0)] = 1e-5,
    from_config: Annotated[
        Optional[Path],
        Option(
            "--from-config",
            help="Begin with random weights, as large as a folder (config.json, tokenizer) or a GGUF file says.",
            metavar="LIKE",
        ),
    ] = None,
) -> None:
    """Train all weights of a model on texts. They must be F32, F16 or BF16 (a GGUF file, or a Hugging Face folder), and
    keep their types in the output. With --from-config a new model is trained from scratch, in F32. A bar on
    stderr shows the progress."""
    if from_config is None:
        with _ended_by_sigterm():
            _run(data, how, model, threads, out, lr, "all")
        return
    if model is not None:
        raise click.BadParameter("--from-config makes a new model: without --model")
    output_of(out, data, from_config)
    new = out.with_name(f".{out.name}.{secrets.token_hex(4)}.gguf")
    with _ended_by_sigterm():
        try:
            write_new_model(from_config.parent if from_config.name == "config.json" else from_config, new, how.seed)
            _run(data, how, str(new), threads, out, lr, "all")
        finally:
            new.unlink(missing_ok=True)


@contextmanager
def _ended_by_sigterm() -> Generator[None]:
    """A block that SIGTERM ends as Ctrl-C does: what was learned is saved, and nothing temporary stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
        output_of(out, data, how.test, m.path, how.resume)  # before the training, which would be lost
        if how.state is not None:
            check_output(how.state, data, how.test, m.path)
        if how.state is not None and how.state.resolve() == out.resolve():
            raise ModelError(f"{out}: cannot be both the output and the state")
        examples = read_examples(data, m, how.ctx_size, mask_prompt=how.mask_prompt, pack=how.pack)
        held = None if how.test is None else read_examples(how.test, m, how.ctx_size, mask_prompt=how.mask_prompt)
        train, _ = split(len(examples), how.val_split, how.seed)
        n_steps = how.steps or steps_of(how.epochs, -(-len(train) // how.batch_size))
        rate = schedule(lr, n_steps, how.lr_schedule, how.warmup)
        sizes = (how.ctx_size, threads, how.ubatch_size, how.clip, how.grad_checkpoint, how.ram)
        t = m.trainer(_OPTIMISERS[how.optimizer](rate, how.weight_decay), what, *sizes)
        check_save(t, out)
        if held is not None:
            _measure(t, held, how.batch_size)
        texts, masks, encoded = columns(examples)
        t.fit(
            texts,
            masks,
            encoded=encoded,
            val_split=how.val_split,
            n_batch=how.batch_size,
            seed=how.seed,
            n_steps=n_steps,
            callback=_tell,
            progress=True,
            state=how.state,
            save_every=how.save_every,
            resume=how.resume,
        )
        if held is not None:
            _measure(t, held, how.batch_size)
        t.save(out)
    print(f"{out}: {len(t.params)} tensors after {t.n_steps} steps")


_OPTIMISERS: dict[str, Callable[[Callable[[int], float], float], Optimiser]] = {
    "adamw": lambda lr, decay: AdamW(lr, weight_decay=decay),
    "adamw8": lambda lr, decay: AdamW8(lr, weight_decay=decay),
    "adafactor": lambda lr, decay: Adafactor(lr, weight_decay=decay),
    "muon": lambda lr, decay: Muon(lr, weight_decay=decay),
    "sgd": lambda lr, decay: SGD(lr, momentum=0.9, weight_decay=decay),
}


def _tell(p: Progress) -> None:
    if p.step == p.n_steps or p.step % max(p.n_steps // 20, 1) == 0:
        print(f"step {p.step} of {p.n_steps}: loss {p.loss:.4f}", flush=True)
    if p.result is not None:
        print(p.result, flush=True)


def _measure(t: Trainer, examples: Sequence[Example], n_batch: int) -> None:
    """Print the mean loss of texts, and their perplexity."""
    total, counted = 0.0, 0
    for i in range(0, len(examples), n_batch):
        batch = examples[i : i + n_batch]
        n = sum(e.n_counted for e in batch)
        total += n * t.loss(*columns(batch))
        counted += n
    print(f"test: loss {total / counted:.4f}, perplexity {math.exp(min(total / counted, 700)):.3f}", flush=True)
