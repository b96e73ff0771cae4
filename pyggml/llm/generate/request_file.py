"""Requests from a file of JSON lines, results into another: a run that was killed goes on where it stopped."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator
from hashlib import sha256
from typing import IO, Any

from pyggml.errors import BatchError, path_name
from pyggml.small_file import open_regular

from .requests import Result

Answers = Callable[[list[Any]], Iterator[Result]]  # of requests, as `batch` gives them


class RequestFile:
    """The requests of a file, one JSON object in each line (see `batch`; blank lines do not count), and the file of
    their results, one in each line, in the same order.

    n_requests  how many there are
    n_done      of which the results file holds the results

    A result has `of`, the begin of the SHA-256 of its request's line, beside what `batch` gives. What a kill left
    unfinished in the last line is taken away. Raises BatchError where the results are not those of these requests, or
    another process writes them; OSError where a file cannot be opened. A context manager: its end closes the file.
    """

    def __init__(self, requests: str | os.PathLike[str], results: str | os.PathLike[str]) -> None:
        with open_regular(path_name(requests, BatchError), BatchError) as f:
            self._lines = [line for line in f.read().splitlines() if line.strip()]
        self.path = path_name(results, BatchError)
        self._out = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (this is a context manager)
        try:
            if os.path.samefile(path_name(requests, BatchError), self.path):
                raise BatchError(f"{self.path}: results cannot be written over their requests")
            if not stat.S_ISREG(os.fstat(self._out.fileno()).st_mode):
                raise BatchError(f"{self.path}: is no file that could be gone on with")
            self.n_requests, self.n_done = len(self._lines), self._resume(self._out)
        except BaseException:
            self._out.close()
            raise

    def run(self, answers: Answers) -> Iterator[Result]:
        """Do what is to be done: `answers` gives the results of requests, as `batch` does. Yields each when the file
        has it."""
        first = self.n_done
        todo = [_parsed(line) for line in self._lines[first:]]
        for result in answers(todo):
            index: int = first + result["index"]
            result["index"] = index
            line = json.dumps({**result, "of": _digest(self._lines[index])}) + "\n"
            data = line.encode()
            if os.write(self._out.fileno(), data) != len(data):
                raise BatchError(f"{self.path}: the disk is full")
            self.n_done += 1
            yield result

    def __enter__(self) -> RequestFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._out.close()

    def _resume(self, out: IO[bytes]) -> int:
        """Results that are there; of the last line only what is whole."""
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchError(f"{self.path}: another process is writing it") from None
        out.seek(0)
        data = out.read()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].splitlines()
        if len(lines) > len(self._lines):
            raise BatchError(f"{self.path}: holds {len(lines)} results of {len(self._lines)} requests")
        for i, line in enumerate(lines):
            try:
                result = json.loads(line)
                fits = result["index"] == i and result["of"] == _digest(self._lines[i])
            except (ValueError, TypeError, LookupError):
                fits = False
            if not fits:
                raise BatchError(f"{self.path}: line {i + 1} is no result of request {i + 1}: name another file")
        out.truncate(whole)
        return len(lines)


def _digest(line: bytes) -> str:
    return sha256(line).hexdigest()[:16]


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as e:
        return BatchError(f"no JSON: {e}")
