# pyright: basic, reportMissingImports=false
"""Train the model that ships with pyggml on a text of tales and export it as GGUF.

    python -m pyggml.tools.train_tales ../shared/data/tales.txt --out /tmp/tales --bf16

needs `torch` and `sentencepiece` (for training only). It cleans the text and cuts it into tales, keeps some back,
trains an SPM vocabulary and a llama on the rest, keeps the state with the best held-out loss, and writes into --out:
log.tsv, best.pt, spm.model, heldout.txt, tales-F32.gguf, tales-Q8_0.gguf and samples.txt.
Same seed, same machine, same number of threads: same model, unless --minutes ran out first.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import random
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import sentencepiece as spm
import torch
from torch.nn import functional as F

from .tales_model import BOS, EOS, Dropout, HParams, Llama, Muon, sample, to_gguf

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


def batches(tales: list[list[int]], n_ctx: int, n_batch: int, rng: np.random.Generator):
    """Endless windows [n_batch, n_ctx + 1]. An epoch has all windows of the joined tales at a random offset, and for
    every eighth of them one more that begins with a long tale, as a prompt does."""
    stream = np.concatenate([np.array(t) for t in tales])
    begins = np.cumsum([0, *(len(t) for t in tales)])[:-1]
    begins = begins[[len(t) > n_ctx for t in tales]]
    begins = begins[begins < len(stream) - n_ctx]
    while True:
        windows = np.arange(rng.integers(n_ctx), len(stream) - n_ctx, n_ctx)
        starts = rng.permutation(np.concatenate([windows, rng.choice(begins, len(windows) // 8)]))
        for i in range(0, len(starts) - n_batch + 1, n_batch):
            yield torch.from_numpy(np.stack([stream[s : s + n_ctx + 1] for s in starts[i : i + n_batch]]))


def autocast(bf16: bool) -> contextlib.AbstractContextManager[object]:
    """A block in which products are computed in bfloat16, if `bf16`."""
    return torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext()


@torch.inference_mode()
def held_out_loss(model: Llama, tales: list[list[int]], bf16: bool) -> tuple[float, int]:
    """Sum of nats and number of tokens predicted: each tale alone, in windows of n_ctx without memory of each other."""
    nats, n, n_ctx = 0.0, 0, model.hp.n_ctx
    for tale in tales:
        for i in range(0, len(tale) - 1, n_ctx):
            w = torch.tensor([tale[i : i + n_ctx + 1]])
            with autocast(bf16):
                logits = model(w[:, :-1])
            nats += float(F.cross_entropy(logits[0].float(), w[0, 1:], reduction="sum"))
            n += w.shape[1] - 1
    return nats, n


def train(
    args: argparse.Namespace, model: Llama, tales: list[list[int]], held: list[list[int]], held_bytes: int
) -> None:
    """Train until --steps or --minutes end; leave the state of the best held-out loss in `model` and best.pt."""
    # Muon for the matrices of the layers, AdamW for embedding and norms: they can share one lr.
    params = list(model.parameters())
    matrices = [p for p in model.blk.parameters() if p.ndim == 2]
    groups = [{"params": [model.token_embd.weight]}, {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [
        *(Muon(matrices[i :: args.threads], args.lr, args.weight_decay) for i in range(args.threads)),
        torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True),
    ]

    def gradient(rng_seed: int, window: torch.Tensor) -> tuple[float, tuple[torch.Tensor, ...]]:
        drop = Dropout(args.dropout, torch.Generator().manual_seed(rng_seed))
        with autocast(args.bf16):
            logits = model(window[None, :-1], drop)
        loss = F.cross_entropy(logits[0].float(), window[1:])
        return loss.item(), torch.autograd.grad(loss, params)

    pool = ThreadPoolExecutor(args.threads)
    data = batches(tales, model.hp.n_ctx, args.batch, np.random.default_rng(args.seed))
    per_epoch = sum(map(len, tales))
    best = held_out_loss(model, held, args.bf16)[0] / sum(len(t) - 1 for t in held) if args.resume else math.inf

    def clock() -> float:  # processor time over threads: a busy machine takes longer, but makes the same model
        return time.process_time() / args.threads

    mean, start, eval_s = 0.0, clock(), 0.0
    log = (args.out / "log.tsv").open("a" if args.resume else "w", buffering=1)
    print("step\tepoch\tminutes\ttok/s\tlr\ttrain\theldout\theldout/byte", file=log)
    for step in range(1, args.steps + 1):
        minutes = (clock() - start) / 60
        done = max(step / args.steps, minutes / args.minutes)  # on a slow machine the clock decides
        lr = args.lr * min(1.0, step / args.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
        for opt in optimizers:
            for group in opt.param_groups:
                group["lr"] = lr
        tokens = next(data)
        seeds = range(args.seed + step * args.batch, args.seed + (step + 1) * args.batch)
        losses, grads = zip(*pool.map(gradient, seeds, tokens), strict=True)
        for i, p in enumerate(params):
            p.grad = torch.stack([g[i] for g in grads]).mean(0)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        list(pool.map(lambda opt: opt.step(), optimizers))
        mean += (sum(losses) / args.batch - mean) / min(step, 100)  # over about the last hundred steps, with dropout
        if step % args.eval_every == 0 or step == args.steps or done >= 1:
            t = clock()
            nats, n = held_out_loss(model, held, args.bf16)
            eval_s += clock() - t
            seen = step * tokens[:, 1:].numel()
            speed = seen / (clock() - start - eval_s)
            row = f"{step}\t{seen / per_epoch:.2f}\t{minutes:.1f}\t{speed:.0f}\t{lr:.2e}\t{mean:.4f}"
            print(f"{row}\t{nats / n:.4f}\t{nats / held_bytes:.4f}", file=log)
            if nats / n < best:
                best = nats / n
                torch.save(model.state_dict(), args.out / "best.tmp")
                (args.out / "best.tmp").replace(args.out / "best.pt")
        if done >= 1:
            break
    model.load_state_dict(torch.load(args.out / "best.pt"))


def write_samples(model: Llama, sp: spm.SentencePieceProcessor, path: Path, seed: int) -> None:
    """Twenty samples of up to 200 tokens at temperature 0.7: ten from nothing, ten from the beginning of a tale."""
    rng = torch.Generator().manual_seed(seed)
    prompts = ["Once upon a time", "There was once a king", "In a great forest lived", "A fox", "The little girl"]
    with path.open("w") as f:
        for i, prompt in enumerate([""] * 10 + prompts * 2, 1):
            tokens = encode(sp, prompt) if prompt else [BOS]
            text = sp.Decode(tokens + list(sample(model, tokens, 200, 0.7, rng)))
            print(f"--- {i}: {prompt!r}\n{text.strip()}\n", file=f, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, train, export."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("text", type=Path, help="the tales, one paragraph a line")
    parser.add_argument("--out", type=Path, required=True, help="folder for everything that is written")
    parser.add_argument("--steps", type=int, default=5000, help="optimizer steps (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=90.0, help="of processor time: end the schedule then")
    parser.add_argument("--batch", type=int, default=8, help="windows of 512 tokens a step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--held-out", type=float, default=0.05, help="share of the text never trained on")
    parser.add_argument("--eval-every", type=int, default=100, help="steps")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 matrix products (fast with AVX512_BF16)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="begin a new schedule at the best.pt that --out holds")
    parser.add_argument("--export-only", action="store_true", help="export the best.pt that --out holds")
    args = parser.parse_args(argv)
    if not args.text.is_file():
        parser.error(f"no such file: {args.text}")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # threads share windows, not products, so that they wait less for each other
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)

    tales, held = hold_out(tales_of(args.text.read_text("utf-8")), args.held_out, random.Random(args.seed))
    (args.out / "heldout.txt").write_text("\n".join(held) + "\n", "utf-8")
    hp = HParams()
    sp = train_vocab(tales, hp.n_vocab, args.out / "spm.model")
    tokens, held_tokens = ([[*encode(sp, t), EOS] for t in ts] for ts in (tales, held))
    model = Llama(hp)
    n_bytes = [sum(len(t.encode()) for t in ts) for ts in (tales, held)]
    for what, ts, n in zip(("train", "held out"), (tokens, held_tokens), n_bytes, strict=True):
        print(f"{what}: {len(ts)} tales, {n} bytes, {sum(map(len, ts))} tokens")
    print(f"model: {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    if args.export_only or args.resume:
        model.load_state_dict(torch.load(args.out / "best.pt"))
    if not args.export_only:
        train(args, model, tokens, held_tokens, n_bytes[1])
    for what, ts, n in zip(("train", "held out"), (tokens[::20], held_tokens), (None, n_bytes[1]), strict=True):
        nats, count = held_out_loss(model, ts, bf16=False)
        print(f"{what}: {nats / count:.4f} nats a token" + (f", {nats / n:.4f} a byte" if n else " (every 20th tale)"))
    to_gguf(model, sp, args.out / "tales-F32.gguf", gguf.LlamaFileType.ALL_F32, ABOUT)
    to_gguf(model, sp, args.out / "tales-Q8_0.gguf", gguf.LlamaFileType.MOSTLY_Q8_0, ABOUT)
    write_samples(model, sp, args.out / "samples.txt", args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
