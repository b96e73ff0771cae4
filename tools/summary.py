"""Summarise the times of a generation: as llama.cpp prints them, and as JSON."""

from __future__ import annotations

from math import exp
from typing import Any

from pyggml.llm.generate.generation import Generation, Token
from pyggml.llm.samplers import StepTrace
from pyggml.llm.vocab import Vocab


def per_second(n: int, seconds: float) -> float:
    """n / seconds; 0 when nothing was measured."""
    return n / seconds if n and seconds > 0 else 0.0


def timings(g: Generation, load: float, total: float) -> dict[str, float]:
    """Milliseconds and tokens per second. `predicted` is all from the first token on, `eval` the model's part of it."""
    t = g.timings
    predicted = t.eval + t.sample
    drafts = g.draft_stats
    return {
        "load_ms": load * 1e3,
        "prompt_n": t.n_prompt,
        "prompt_ms": t.prompt * 1e3,
        "prompt_per_second": per_second(t.n_prompt, t.prompt),
        "predicted_n": len(g.ids),
        "predicted_ms": predicted * 1e3,
        "predicted_per_second": per_second(t.n_eval, predicted),
        "sample_n": t.n_sample,
        "sample_ms": t.sample * 1e3,
        "eval_ms": t.eval * 1e3,
        "total_ms": total * 1e3,
    } | ({} if drafts is None else {"draft_n": drafts.n_drafted, "draft_n_accepted": drafts.n_accepted})


def table(g: Generation, load: float, total: float) -> str:
    """The summary that llama.cpp's tools print."""
    t = g.timings

    def line(what: str, seconds: float, n: int, unit: str) -> str:
        each = seconds * 1e3 / n if n else 0.0
        head = f"{what:>16} = {seconds * 1e3:10.2f} ms / {n:5d} {unit:<6}"
        return f"{head} ({each:8.3f} ms per token, {per_second(n, seconds):10.2f} tokens per second)"

    drafts = [] if g.draft_stats is None else [str(g.draft_stats)]
    return "\n".join(
        (
            f"{'load time':>16} = {load * 1e3:10.2f} ms",
            line("sample time", t.sample, t.n_sample, "runs"),
            line("prompt eval time", t.prompt, t.n_prompt, "tokens"),
            line("eval time", t.eval, t.n_eval, "runs"),
            f"{'total time':>16} = {total * 1e3:10.2f} ms / {t.n_prompt + t.n_sample:5d} tokens",
            *drafts,
        )
    )


def probs_json(token: Token, vocab: Vocab) -> dict[str, Any]:
    """A token with its log-probability, and the likeliest ones, as llama.cpp's server gives them."""

    def one(i: int, logprob: float | None) -> dict[str, Any]:
        return {"id": i, "token": _piece(i, vocab), "logprob": logprob}

    return {**one(token.id, token.logprob), "top_logprobs": [one(i, p) for i, p in token.top]}


def probs_line(token: Token, vocab: Vocab) -> str:
    """A token and the likeliest ones on one line, with probabilities."""
    best = ", ".join(f"{_piece(i, vocab)!r} {exp(p):.4f}" for i, p in token.top)
    return f"{_piece(token.id, vocab)!r} {exp(token.logprob or 0.0):.4f}: {best}"


def _piece(token: int, vocab: Vocab) -> str:
    return vocab.token_to_piece(token, special=True).decode("utf-8", "replace")


def trace_lines(step: StepTrace, vocab: Vocab) -> str:
    """One line for each sampler of a step: candidates before and after, and the probability of the chosen token."""
    lines = [f"token {step.token} {_piece(step.token, vocab)!r}"]
    for s in step.samplers:
        best = f"best {s.p_best:.4f} {_piece(s.best, vocab)!r}"
        lines.append(f"  {s.sampler:<28} {s.n_before:6d} -> {s.n_after:6d}   p {s.p:.4f}   {best}")
    return "\n".join(lines)


def trace_json(step: StepTrace) -> dict[str, Any]:
    """A step as a plain object."""
    return {"token": step.token, "samplers": [s._asdict() for s in step.samplers]}
