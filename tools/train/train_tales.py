# pyright: basic, reportMissingImports=false
"""Train the model that ships with pyggml on a text of tales, with pyggml, and write it as GGUF.

    python -m pyggml.tools.train.train_tales ../shared/data/tales.txt --out /tmp/tales

needs `sentencepiece`, for the vocabulary. It cleans the text and cuts it into tales, keeps some back, learns an SPM
vocabulary, trains a llama with random weights on the rest, and keeps the state with the best held-out loss. In --out
there are then: log.tsv, spm.model, heldout.txt, begin.gguf (random), tales-F32.gguf, tales-Q8_0.gguf and samples.txt.
Same seed, same kind of processor: same model, for any number of threads.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import sentencepiece as spm

import pyggml as gg
from pyggml.learn.trainer import Trainer
from pyggml.llm.quantize.rewrite import plan_quantization, write_quantized

from .tales_model import BOS, EOS, HParams, write_random

ABOUT = {
    "name": "tales",
    "author": "pyggml authors",
    "license": "mit",
    "description": "A small llama trained from scratch on public-domain tales (Grimm, Andersen, Aesop, Kipling's "
    "Jungle Book, Peter Pan, Alice in Wonderland), for tests and demonstrations.",
    "source": "public-domain English texts, tales.txt; trained with pyggml's tools/train_tales.py",
}
NOT_TALES = {"LIFE OF AESOP", "PREFACE", "FOOTNOTES"}
SMALL_WORD = re.compile(
    "an?|and|as|at|by|for|from|h(er|is|ow)|in(to)?|i[st]|o[fnr]|over|the(ir)?|to|up(on)?|who|with(out)?"
)


def is_title(line: str, following: str) -> bool:
    """Whether a line is the heading of a tale or chapter: short, in title case, before a paragraph."""
    if re.match(r"(Legend )?\d+\*? [A-Z]", line) and len(line) < 80:
        return True
    if len(line) > 70 or len(following) < 60:
        return False
    if re.match(r"chapter ", line, re.IGNORECASE) or (line.isupper() and len(line) > 6):
        return True
    if line[0] in "\"'*[" or line[-1] in ".,;:?!\"'-":
        return False
    words = re.findall(r"[A-Za-z][\w'.-]*", line)
    return bool(words) and words[0][0].isupper() and all(w[0].isupper() or SMALL_WORD.fullmatch(w) for w in words)


def tales_of(text: str) -> list[str]:
    """Cut the text (one paragraph a line) into tales, without titles, notes, rules and typewriter marks."""
    lines = [line.strip() for line in text.split("\n")]
    tales: list[list[str]] = [[]]
    keep = True
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if not line or line.startswith(("*", "[")):
            continue
        if is_title(line, following):
            keep = line not in NOT_TALES
            tales.append([])
        elif keep and not (line.isupper() and len(line) > 6):  # names of books, "THE END"
            line = re.sub(r"\[[^]]*\]|(?<=\w)[*]|_", "", line)
            line = re.sub(r"\s+", " ", re.sub(r"-{2,}", "--", line)).strip()
            if not tales[-1]:  # "A WOLF who had" -> "A wolf who had"
                line = re.sub(r"^[A-Z]+(?:[ '-]+[A-Z]{2,})+\b|^[A-Z]{2,}\b", lambda m: m[0].capitalize(), line)
            tales[-1].append(line)
    return [t for t in ("\n".join(p) for p in tales) if len(t) > 200]


def hold_out(tales: list[str], share: float, rng: random.Random) -> tuple[list[str], list[str]]:
    """Split into (train, held out) by whole tales. The text holds many tales in two translations, so a tale that shares
    more than 2 % of its 6-word runs with the others is never held out: its loss would measure memory. A tale that
    would fill more than a tenth of the held-out text is not held out either."""
    grams = [{tuple(w[i : i + 6]) for i in range(len(w) - 5)} for w in (re.findall(r"\w+", t.lower()) for t in tales)]
    seen: dict[tuple[str, ...], int] = {}
    for g in grams:
        for gram in g:
            seen[gram] = seen.get(gram, 0) + 1
    order = list(range(len(tales)))
    rng.shuffle(order)
    held: set[int] = set()
    budget = share * sum(map(len, tales))
    largest = budget / 10
    for i in order:
        shared = sum(seen[g] > 1 for g in grams[i]) / max(1, len(grams[i]))
        if shared <= 0.02 and len(tales[i]) <= min(budget, largest):
            held.add(i)
            budget -= len(tales[i])
    return [t for i, t in enumerate(tales) if i not in held], [tales[i] for i in sorted(held)]


def train_vocab(tales: list[str], n_vocab: int, path: Path) -> spm.SentencePieceProcessor:
    """Train an SPM (BPE) vocabulary with byte fallback. It learns from paragraphs without a leading space, because that
    is how they stand after a newline; `encode` adds a space before a text, as add_space_prefix does in llama.cpp."""
    model = io.BytesIO()
    spm.SentencePieceTrainer.Train(
        sentence_iterator=iter([line for t in tales for line in t.split("\n")]),
        model_writer=model,
        model_type="bpe",
        vocab_size=n_vocab,
        byte_fallback=True,
        character_coverage=1.0,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        max_sentence_length=1 << 20,
        num_threads=1,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


def encode(sp: spm.SentencePieceProcessor, text: str) -> list[int]:
    """Token ids of one text, bos first."""
    return [BOS, *sp.Encode(" " + text)]


def batches(tales: list[list[int]], n_ctx: int, n_batch: int, rng: np.random.Generator) -> Iterator[list[list[int]]]:
    """Endless batches of windows of n_ctx + 1 tokens. An epoch has all windows of the joined tales at a random offset,
    and for every eighth of them one more that begins with a long tale, as a prompt does."""
    stream = np.concatenate([np.array(t, np.int32) for t in tales])
    begins = np.cumsum([0, *(len(t) for t in tales)])[:-1]
    begins = begins[[len(t) > n_ctx for t in tales]]
    begins = begins[begins < len(stream) - n_ctx]
    while True:
        windows = np.arange(rng.integers(n_ctx), len(stream) - n_ctx, n_ctx)
        starts = rng.permutation(np.concatenate([windows, rng.choice(begins, len(windows) // 8)]))
        for i in range(0, len(starts) - n_batch + 1, n_batch):
            yield [stream[s : s + n_ctx + 1].tolist() for s in starts[i : i + n_batch]]


def windows_of(tales: list[list[int]], n_ctx: int) -> list[list[int]]:
    """Each tale alone, in windows of n_ctx predictions without memory of each other."""
    return [t[i : i + n_ctx + 1] for t in tales for i in range(0, len(t) - 1, n_ctx)]


def loss_of(trainer: Trainer, windows: list[list[int]], n_batch: int) -> float:
    """Nats a token over all windows."""
    nats = 0.0
    for i in range(0, len(windows), n_batch):
        batch = windows[i : i + n_batch]
        nats += trainer.loss(batch) * sum(len(w) - 1 for w in batch)
    return nats / sum(len(w) - 1 for w in windows)


class Mean:
    """Exponential means of the parameters over the steps: their held-out loss is lower than that of any single step."""

    def __init__(self, trainer: Trainer, keep: float) -> None:
        self._trainer, self._keep, self._n = trainer, keep, 0
        self.values = {name: np.zeros(w.shape, np.float32) for name, w in trainer.params.items()}

    def add(self) -> None:
        """Follow the parameters. The first steps count as if there had been no others before."""
        self._n += 1
        new = (1 - self._keep) / (1 - self._keep**self._n)
        for name, w in self._trainer.params.items():
            self.values[name] += np.float32(new) * (w.numpy() - self.values[name])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The trainer has the means as its parameters within the block."""
        kept = {name: w.numpy().copy() for name, w in self._trainer.params.items()}
        self._set(self.values)
        try:
            yield
        finally:
            self._set(kept)

    def save(self, path: Path, *numbers: float) -> None:
        """Write the means, and numbers beside them."""
        np.savez(path, allow_pickle=False, numbers=np.array([self._n, *numbers]), **self.values)

    def load(self, path: Path) -> list[float]:
        """Go on from what `save` wrote; the result is the numbers."""
        with np.load(path) as file:
            self.values = {name: file[name] for name in self.values}
            n, *numbers = file["numbers"].tolist()
        self._n = int(n)
        return numbers

    def _set(self, values: dict[str, npt.NDArray[np.float32]]) -> None:
        for name, w in self._trainer.params.items():
            w.set(values[name])


def rate(lr: float, warmup: int, n_steps: int) -> Callable[[int], float]:
    """The learning rate of each step: up to `lr` in a straight line, along half a cosine down to 2 % of it."""

    def at(step: int) -> float:
        done = 0.5 * (1 + math.cos(math.pi * min(1.0, (step + 1) / n_steps)))
        return lr * min(1.0, (step + 1) / warmup) * (0.02 + 0.98 * done)

    return at


def train(
    args: argparse.Namespace, hp: HParams, tales: list[list[int]], held: list[list[int]], held_bytes: int
) -> None:
    """Train what begin.gguf holds, or with --resume go on; leave the means of the best held-out loss in
    tales-F32.gguf."""
    # Muon for the matrices of the layers, AdamW for embedding and norms: they can share one lr.
    opt = gg.Muon(lr=rate(args.lr, args.warmup, args.steps), weight_decay=args.weight_decay)
    trainer = gg.load_model(args.out / "begin.gguf").trainer(
        opt, n_ctx=hp.n_ctx + 1, n_threads=args.threads, dropout=args.dropout, seed=args.seed
    )
    means = Mean(trainer, args.mean)
    data = batches(tales, hp.n_ctx, args.batch, np.random.default_rng(args.seed))
    per_epoch, windows, best = sum(map(len, tales)), windows_of(held, hp.n_ctx), math.inf
    n_held = sum(len(w) - 1 for w in windows)
    mean, start, learning, state = 0.0, time.perf_counter(), 0.0, args.out / "state.gguf"
    if args.resume:
        trainer.load_state(state)
        mean, best = means.load(args.out / f"means-{trainer.n_steps}.npz")
        for _ in range(trainer.n_steps):
            next(data)
    first = trainer.n_steps
    log = args.out / "log.tsv"
    if not first:
        log.write_text("step\tepoch\tminutes\ttok/s\tlr\ttrain\theldout\theldout/byte\n")
    for step in range(first + 1, args.steps + 1):
        batch, t = next(data), time.perf_counter()
        lr = opt.lr(step - 1) if callable(opt.lr) else opt.lr
        mean += (trainer.step(batch) - mean) / min(step, 100)  # over about the last hundred steps, with dropout
        means.add()
        learning += time.perf_counter() - t
        if step % args.eval_every == 0 or step == args.steps:
            with means.applied():
                loss = loss_of(trainer, windows, args.batch)
                if loss < best:
                    best = loss
                    trainer.save(args.out / "tales-F32.gguf")
            seen, minutes = step * args.batch * hp.n_ctx, (time.perf_counter() - start) / 60
            speed = (step - first) * args.batch * hp.n_ctx / learning
            row = f"{step}\t{seen / per_epoch:.2f}\t{minutes:.1f}\t{speed:.0f}\t{lr:.2e}\t{mean:.4f}"
            with log.open("a") as f:
                print(f"{row}\t{loss:.4f}\t{loss * n_held / held_bytes:.4f}", file=f)
            means.save(args.out / f"means-{step}.npz", mean, best)
            trainer.save_state(state)
            for old in set(args.out.glob("means-*.npz")) - {args.out / f"means-{step}.npz"}:
                old.unlink()


def write_samples(model: gg.Model, path: Path, seed: int) -> None:
    """Twenty samples of up to 200 tokens at temperature 0.7: ten from nothing, ten from the beginning of a tale."""
    prompts = ["Once upon a time", "There was once a king", "In a great forest lived", "A fox", "The little girl"]
    with path.open("w") as f:
        for i, prompt in enumerate([""] * 10 + prompts * 2, 1):
            text = "".join(model.generate(prompt, 200, temp=0.7, seed=seed + i))
            print(f"--- {i}: {prompt!r}\n{(prompt + text).strip()}\n", file=f, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, train, export."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("text", type=Path, help="the tales, one paragraph a line")
    parser.add_argument("--out", type=Path, required=True, help="folder for everything that is written")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps (default %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows of 512 tokens a step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.7)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--mean", type=float, default=0.99, help="how slowly the mean of the parameters follows")
    parser.add_argument("--held-out", type=float, default=0.05, help="share of the text never trained on")
    parser.add_argument("--eval-every", type=int, default=100, help="steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on with the run that --out has the state of")
    args = parser.parse_args(argv)
    if not args.text.is_file():
        parser.error(f"no such file: {args.text}")
    args.out.mkdir(parents=True, exist_ok=True)

    tales, held = hold_out(tales_of(args.text.read_text("utf-8")), args.held_out, random.Random(args.seed))
    (args.out / "heldout.txt").write_text("\n".join(held) + "\n", "utf-8")
    hp = HParams()
    sp = train_vocab(tales, hp.n_vocab, args.out / "spm.model")
    tokens, held_tokens = ([[*encode(sp, t), EOS] for t in ts] for ts in (tales, held))
    n_bytes = [sum(len(t.encode()) for t in ts) for ts in (tales, held)]
    for what, ts, n in zip(("train", "held out"), (tokens, held_tokens), n_bytes, strict=True):
        print(f"{what}: {len(ts)} tales, {n} bytes, {sum(map(len, ts))} tokens", flush=True)
    write_random(args.out / "begin.gguf", hp, sp, ABOUT, np.random.default_rng(args.seed))
    train(args, hp, tokens, held_tokens, n_bytes[1])
    best = args.out / "tales-F32.gguf"
    trained = gg.load_model(best).trainer(gg.SGD(), n_ctx=hp.n_ctx + 1, n_threads=args.threads)
    for what, ts in (("train (every 20th tale)", tokens[::20]), ("held out", held_tokens)):
        print(f"{what}: {loss_of(trained, windows_of(ts, hp.n_ctx), args.batch):.4f} nats a token", flush=True)
    write_quantized(plan_quantization(best, "Q8_0"), args.out / "tales-Q8_0.gguf")
    write_samples(gg.load_model(args.out / "tales-Q8_0.gguf"), args.out / "samples.txt", args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
