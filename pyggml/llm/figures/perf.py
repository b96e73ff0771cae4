"""The counters of a context, as llama.cpp has them (llama_perf_context, llama_perf_sampler)."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass
class Perf:
    """Counters; printed, a summary.

    t_start_ms   when the context was made (or the counters were reset), on time.perf_counter's clock
    t_load_ms    milliseconds from there to the end of the first decode
    n_p_eval     tokens of decodes of more than one token (prompts), t_p_eval_ms their time
    n_eval       decodes of a single token, t_eval_ms their time. A token that was evaluated with guesses counts here,
                 and so does each guess that was right
    n_sample     tokens that were sampled, t_sample_ms their time
    n_queued     tokens of a decode that is not finished
    t_last_ms    the time of the last decode
    """

    t_start_ms: float = 0.0
    t_load_ms: float = 0.0
    t_p_eval_ms: float = 0.0
    t_eval_ms: float = 0.0
    t_sample_ms: float = 0.0
    n_p_eval: int = 0
    n_eval: int = 0
    n_sample: int = 0
    n_queued: int = 0
    t_last_ms: float = 0.0

    def decoded(self, start: float, n: int) -> None:
        """Count a decode of `n` tokens that took from `start` (of time.perf_counter()) until now."""
        now = time.perf_counter()
        self.t_last_ms = (now - start) * 1e3
        if n == 1:
            self.n_eval += 1
            self.t_eval_ms += self.t_last_ms
        else:
            self.n_p_eval += n
            self.t_p_eval_ms += self.t_last_ms
        if not self.t_load_ms:
            self.t_load_ms = now * 1e3 - self.t_start_ms

    def guessed(self, n: int) -> None:
        """Count the last decode as of one token, the other `n` - 1 being guesses. 0: count a guess that was right."""
        self.n_eval += 1
        if n:
            self.n_p_eval -= n
            self.t_p_eval_ms -= self.t_last_ms
            self.t_eval_ms += self.t_last_ms

    def sampled(self, start: float) -> None:
        """Count one token that was sampled since `start` (of time.perf_counter())."""
        self.n_sample += 1
        self.t_sample_ms += (time.perf_counter() - start) * 1e3

    def __str__(self) -> str:
        rows = (
            ("sampling", self.t_sample_ms, self.n_sample, "tokens"),
            ("prompt eval", self.t_p_eval_ms, self.n_p_eval, "tokens"),
            ("eval", self.t_eval_ms, self.n_eval, "runs"),
        )
        lines = [f"{'load':>12} {self.t_load_ms:10.2f} ms"]
        for name, ms, n, unit in rows:
            each, rate = (ms / n, n / ms * 1e3) if n and ms else (0.0, 0.0)
            speed = f"({each:8.3f} ms per token, {rate:10.2f} tokens/s)"
            lines.append(f"{name:>12} {ms:10.2f} ms / {n:6d} {unit:<6} {speed}")
        total = time.perf_counter() * 1e3 - self.t_start_ms
        lines.append(f"{'total':>12} {total:10.2f} ms / {self.n_p_eval + self.n_eval:6d} tokens")
        return "\n".join(lines)
