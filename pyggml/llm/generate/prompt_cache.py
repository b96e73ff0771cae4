"""The prompt cache of the command line: a saved state with the tokens it stands for (llama.cpp's session file)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyggml.errors import ModelError
from pyggml.models.memory.memory import Memory
from pyggml.models.memory.state_file import Path

from .prefixes import common_prefix

if TYPE_CHECKING:
    from ..decoder import Decoder


class Session(NamedTuple):
    """What a session file gave.

    prompt      the prompt that was asked for; when it was empty, the tokens of the file
    n_matched   tokens of the prompt that the file begins with
    n_past      tokens of the prompt that need no evaluation: n_matched, or one less when the logits of the last token
                must be computed again. Sequence 0 holds just these tokens
    report      the same in words, as llama.cpp says it
    """

    prompt: list[int]
    n_matched: int
    n_past: int
    report: str


def open_session(ctx: Decoder, path: Path, prompt: Sequence[int]) -> Session:
    """Load the session file at `path` into `ctx`, and keep what `prompt` begins with.

    No file, or an empty one, is a new session. Raises StateError, KVCacheFull, see `load_state`, ModelError for an
    encoder-decoder; then nothing has changed.
    """
    prompt = list(prompt)
    if ctx.model.architecture.encode is not None:
        raise ModelError(f"{ctx.model.arch} is an encoder-decoder: it encodes its prompt, and has no session of it")
    if not os.path.exists(path):
        return Session(prompt, 0, 0, "session file does not exist, will create")
    if not os.path.isdir(path) and not os.path.getsize(path):
        return Session(prompt, 0, 0, "the session file is empty, a new session will be initialized")
    tokens = ctx.load_state(path)
    if not _holds(ctx.memory, len(tokens)):
        tokens = []  # the state is not that of these tokens
    wanted = prompt or tokens
    n = n_past = common_prefix(wanted, tokens)
    if n == len(wanted) and (len(tokens) > n or not len(ctx.logits)):
        n_past = max(n - 1, 0)
    if not ctx.memory.seq_rm(-1, n_past, -1):  # a sliding window or a state has moved on
        ctx.memory.clear()
        n = n_past = 0
    return Session(wanted, n, n_past, _report(n, len(wanted), bool(prompt)))


def save_session(ctx: Decoder, path: Path, tokens: Sequence[int]) -> None:
    """Write the context to a session file, with those of `tokens` that were evaluated in sequence 0.

    Not for a context whose positions were changed (`LongContext.moved`). Raises StateError when the file cannot be
    written.
    """
    ctx.save_state(path, tokens[: ctx.memory.seq_pos_max(0) + 1])


def _holds(memory: Memory, n: int) -> bool:
    """Whether there is one sequence, with positions 0 .. n - 1."""
    if not memory.caches:
        return [cell.pos for cell in memory.cells] == [n - 1] * (n > 0)
    pos = memory.caches[0].pos
    return np.array_equal(np.sort(pos[pos >= 0]), np.arange(n))


def _report(n: int, n_prompt: int, given: bool) -> str:
    if n == n_prompt:
        return "session file has exact match for prompt!" if given else "using full prompt from session file"
    if n < n_prompt // 2:
        return f"session file has low similarity to prompt ({n} / {n_prompt} tokens); will mostly be reevaluated"
    return f"session file matches {n} / {n_prompt} tokens of prompt"
