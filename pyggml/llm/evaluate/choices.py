"""Multiple-choice tasks: the model chooses the answer that it finds likeliest. Files and scores are those of
llama.cpp's perplexity tool: HellaSwag's text files, and binary files of tasks."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from pyggml.errors import BatchError, GGUFError, KVCacheFull
from pyggml.types import Floats

from ..batch import Batch
from ..context import LlamaContext
from ..decoder import Decoder
from ..options import ContextOptions
from .chunks import nll_of

if TYPE_CHECKING:
    from ..loaded import LoadedModel

_Z = 1.95996398454  # 95 % of a normal distribution lie within this number of standard deviations
_HELLASWAG = 6  # lines of a task: the beginning, the index of the right ending, four endings


@dataclass(frozen=True)
class Task:
    """A text, several ways to continue it, and which of them are right."""

    question: str
    answers: Sequence[str]
    right: Sequence[int]


@dataclass(frozen=True)
class Score:
    """After `n_done` of `n_tasks` tasks: how many were right, and how many answers there were.

    error   the standard error of the share that was right; NaN after one task
    chance  the share that a choice at random would get right
    """

    n_done: int
    n_tasks: int
    n_right: int
    n_answers: int

    @property
    def share(self) -> float:
        """The share of tasks that were right."""
        return self.n_right / self.n_done

    @property
    def error(self) -> float:
        return sqrt(self.share * (1 - self.share) / (self.n_done - 1)) if self.n_done > 1 else float("nan")

    @property
    def chance(self) -> float:
        return self.n_done / self.n_answers

    @property
    def interval(self) -> tuple[float, float]:
        """The two ends of the interval in which the share lies with 95 % probability (Wilson)."""
        z = _Z**2 / self.n_done
        half = z * sqrt(self.n_done * (4 * self.share * (1 - self.share) + z)) / (2 * _Z)
        return (self.share + z / 2 - half) / (1 + z), (self.share + z / 2 + half) / (1 + z)


def hellaswag_tasks(text: str) -> list[Task]:
    """The tasks of a HellaSwag file: six lines each. Raises BatchError for a malformed task."""
    lines = text.removesuffix("\n").split("\n")
    if len(lines) % _HELLASWAG:
        raise BatchError(f"HellaSwag: {len(lines)} lines are no tasks of {_HELLASWAG} lines")
    tasks: list[Task] = []
    for i in range(0, len(lines), _HELLASWAG):
        question, label, *endings = lines[i : i + _HELLASWAG]
        if label.strip() not in ("0", "1", "2", "3"):
            raise BatchError(f"HellaSwag: line {i + 2} is no index of an ending: {label!r:.40}")
        tasks.append(Task(question, endings, [int(n == int(label)) for n in range(4)]))
    return tasks


def choice_tasks(data: bytes) -> list[Task]:
    """The tasks of a binary file: the number of tasks and their positions (uint32 each), then for each task its
    question and two lists of answers with labels. The first list has a single right answer; the second may have
    several, and is not used. Raises GGUFError for a file that is not one."""
    at = 0

    def number() -> int:
        nonlocal at
        (n,) = struct.unpack_from("<I", data, at)
        at += 4
        return int(n)

    def text() -> str:
        nonlocal at
        n = number()
        if n > len(data) - at:
            raise ValueError
        at += n
        return data[at - n : at].decode("utf-8", "replace")

    def answers() -> tuple[list[str], list[int]]:
        n = number()
        if 8 * n > len(data) - at:
            raise ValueError
        found = [text() for _ in range(n)]
        return found, [number() for _ in range(n)]

    try:
        n_tasks = number()
        if not 0 < n_tasks <= len(data) // 4:
            raise ValueError
        at += 4 * n_tasks
        tasks: list[Task] = []
        for _ in range(n_tasks):
            question, (found, labels), _several = text(), answers(), answers()
            tasks.append(Task(question, found, labels))
    except (struct.error, ValueError):
        raise GGUFError(f"no file of multiple-choice tasks: it makes no sense at byte {at}") from None
    return tasks


def chosen_tasks(tasks: Sequence[Task], n: int) -> list[Task]:
    """`n` of the tasks at random, the same ones each time. All tasks, in order, when `n` is 0 or at least their
    number."""
    if n <= 0 or n >= len(tasks):
        return list(tasks)
    return [tasks[i] for i in np.random.default_rng(1).permutation(len(tasks))[:n]]


def score(
    model: LoadedModel, tasks: Sequence[Task], n_ctx: int = 512, context: ContextOptions | None = None
) -> Iterator[Score]:
    """How many of the tasks a model gets right; yields the score after each task. The model chooses the answer whose
    tokens have the largest mean log-probability after the question.

    Raises BatchError for a task without a question or answers, or with an empty answer; KVCacheFull for a task longer
    than `n_ctx`.
    """
    most = max((len(t.answers) for t in tasks), default=0)
    for t in tasks:
        if not t.question or not t.answers or not all(t.answers):
            raise BatchError(f"a task needs a question and answers that are not empty: {t.question!r:.60}")
    if not tasks:
        raise BatchError("there are no tasks")
    options: ContextOptions = {}
    options.update(context or {})
    options["n_seq_max"] = most
    return _scores(LlamaContext(model, n_ctx, **options), tasks)


def _scores(ctx: Decoder, tasks: Sequence[Task]) -> Iterator[Score]:
    n_right = n_answers = 0
    with ctx:
        for i, task in enumerate(tasks, 1):
            best = int(np.argmax(_log_probs(ctx, task)))
            n_right += task.right[best] == 1
            n_answers += len(task.answers)
            yield Score(i, len(tasks), n_right, n_answers)


def _log_probs(ctx: Decoder, task: Task) -> list[float]:
    """The mean log-probability of each answer's tokens. The beginning that all answers share is evaluated once."""
    texts = [ctx.model.tokenize(f"{task.question} {answer}") for answer in task.answers]
    common = next((i for i, t in enumerate(zip(*texts, strict=False)) if len(set(t)) > 1), min(map(len, texts)))
    common = max(min(common, min(map(len, texts)) - 1), 1)  # leave a token to predict, and one to predict it from
    needed = common + sum(len(t) - common for t in texts)
    if needed > ctx.n_ctx:
        raise KVCacheFull(f"a task of {needed} tokens, where the context has {ctx.n_ctx} cells", needed, ctx.n_ctx)
    ctx.memory.clear()
    seqs = tuple(range(len(texts)))
    first = _decoded(ctx, [(token, i, seqs) for i, token in enumerate(texts[0][:common])], [common - 1])
    steps = [(t[i], i, (s,)) for s, t in enumerate(texts) for i in range(common, len(t) - 1)]
    rest = _decoded(ctx, steps, range(len(steps)))
    sums = -nll_of(np.repeat(first, len(texts), axis=0), np.array([t[common] for t in texts], np.int32))
    if steps:
        following = np.array([t[i + 1] for t in texts for i in range(common, len(t) - 1)], np.int32)
        np.add.at(sums, [seq[0] for _, _, seq in steps], -nll_of(rest, following))
    return [float(x) / (len(t) - common) for x, t in zip(sums, texts, strict=True)]


def _decoded(ctx: Decoder, steps: Sequence[tuple[int, int, tuple[int, ...]]], outputs: Sequence[int]) -> Floats:
    """Evaluate tokens (each with its position and sequences); returns the logits [n, n_vocab] of some of them."""
    wanted, rows = set(outputs), [np.empty((0, ctx.model.hparams.n_vocab), np.float32)]
    for start in range(0, len(steps), ctx.n_batch):
        batch = Batch()
        for i, (token, pos, seqs) in enumerate(steps[start : start + ctx.n_batch], start):
            batch.add(token, pos, seqs, i in wanted)
        ctx.decode(batch)
        rows.append(np.array(ctx.logits))
    return np.concatenate(rows)
