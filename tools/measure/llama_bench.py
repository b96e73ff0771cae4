"""Tokens per second of llama.cpp, or of a fork of it, by its own program: `pyggml bench --against PATH`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import click


def tokens_per_second(program: Path, options: Sequence[str]) -> float:
    """Run `llama-bench` once with `options`, which ask for one test and one repetition. It warms itself up.

    Raises ClickException when the program cannot be started, when it fails (with its last line), and when it prints
    anything but the result of one test."""
    command = [str(program), *options, "-r", "1", "-o", "json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as e:
        raise click.ClickException(f"{program} does not start: {e.strerror}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise click.ClickException(f"{program} failed ({done.returncode}): {said[-1] if said else 'it says nothing'}")
    try:
        (row,) = json.loads(done.stdout)
        return float(row["avg_ts"])
    except (ValueError, TypeError, KeyError):
        raise click.ClickException(f"{program} is no llama-bench: it prints {done.stdout.strip()[:80]!r}") from None
