"""Requests from a file of JSON lines, results into another: a run that was killed goes on where it stopped."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from math import isfinite
from typing import IO, Any, NoReturn, cast

from pyggml.errors import BatchError, path_name
from pyggml.gguf_io.atomic_file import AtomicFile, append
from pyggml.small_file import open_regular
from pyggml.system.files import lock_file

from .requests import Result

Answers = Callable[[list[Any]], Iterator[Result]]  # answers requests, as `batch` does
_BEGIN = b'{"index": '  # each result's line begins so


class RequestFile:
    """The requests of a file ("-": of the standard input), one JSON object in each line (see `batch`; blank lines do
    not count), and the file of their results, one in each line, in the same order.

    n_requests  how many requests there are
    n_done      how many of them have a result in the file
    n_errors    how many of these results are errors

    A result has `of`, the beginning of the SHA-256 of its request's line, and `by`, the `record`: a JSON object with
    the model and the options that gave the answer, as {"model": "3f..", "options": {"temp": 0}}. Results with another
    record, or of a request that has changed since, are refused, so that answers of two models never mix in a file. With
    `retry` the requests whose result is an error are answered again, whether they were mended or not. Their new results
    stand at the end of the file until the run ends; then the file is put in order.

    When a kill has left the last line unfinished, that line is taken away. Raises BatchError when the file holds
    anything but results of these requests with this record, and when another process writes it; OSError when a file
    cannot be opened. It is a context manager, whose end closes the file.
    """

    def __init__(
        self,
        requests: str | os.PathLike[str],
        results: str | os.PathLike[str],
        record: Mapping[str, Any] | None = None,
        retry: bool = False,
    ) -> None:
        source = path_name(requests, BatchError)
        if source == "-":
            data = sys.stdin.buffer.read()
        else:
            with open_regular(source, BatchError) as f:
                data = f.read()
        self._lines = [line for line in data.splitlines() if line.strip()]
        self.path = path_name(results, BatchError)
        self._record = {} if record is None else {"by": json.loads(json.dumps(record))}
        self._out = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (this is a context manager)
        try:
            if source != "-" and os.path.samefile(source, self.path):
                raise BatchError(f"{self.path}: results cannot be written over their requests")
            if not stat.S_ISREG(os.fstat(self._out.fileno()).st_mode):
                raise BatchError(f"{self.path}: is no file that could be gone on with")
            self.n_requests = len(self._lines)
            self._is_error = self._resume(self._out, retry)
            if retry:
                self._is_error = {i: False for i, is_error in self._is_error.items() if not is_error}
            elif self.n_done == self.n_requests:
                self._put_in_order()
        except BaseException:
            self._out.close()
            raise

    @property
    def n_done(self) -> int:
        return len(self._is_error)

    @property
    def n_errors(self) -> int:
        return sum(self._is_error.values())

    def run(self, answers: Answers) -> Iterator[Result]:
        """Have the requests answered that have no result yet. `answers` gives the results of requests, as `batch` does.
        Yields each result when the file has it."""
        todo = [i for i in range(self.n_requests) if i not in self._is_error]
        for result in answers([_parsed(self._lines[i]) for i in todo]):
            index = todo[int(result["index"])]
            result["index"] = index
            data = self._written(result)
            append(self._out.fileno(), data, self.path)
            self._is_error[index] = result.get("error") is not None
            yield result
        self._put_in_order()

    def __enter__(self) -> RequestFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._out.close()

    def _written(self, result: Result) -> bytes:
        """The line of a result. One with numbers that JSON does not have becomes an error."""
        ours = {"of": _digest(self._lines[int(result["index"])]), **self._record}
        try:
            text = json.dumps({**result, **ours}, allow_nan=False)
        except ValueError:
            for key in result.keys() - {"index"}:
                del result[key]
            result["error"] = "the result has a number that is not finite, which JSON does not have"
            text = json.dumps({**result, **ours})
        return text.encode() + b"\n"

    def _resume(self, out: IO[bytes], retry: bool) -> dict[int, bool]:
        """Take away what a kill left unfinished. Returns which requests have a result, and whether it is an error."""
        try:
            lock_file(out.fileno())
        except BlockingIOError:
            raise BatchError(f"{self.path}: another process is writing it") from None
        if not os.path.samestat(os.fstat(out.fileno()), os.stat(self.path)):  # put in order since it was opened
            raise BatchError(f"{self.path}: another process has written it just now: try again")
        lines, rest = self._read(out)
        all_results = [_loaded(line) for line in lines]
        latest = {result.get("index", -1): result for result in all_results}
        found: dict[int, bool] = {}
        for no, result in enumerate(all_results, 1):
            is_last = latest[result.get("index", -1)] is result
            is_error = result.get("error") is not None
            if not ((retry or not is_last) and is_error and 0 <= result["index"] < self.n_requests):
                self._check(no, result, len(lines))  # the request of an error that is tried again may be mended since
            found[result["index"]] = is_error
        if not (rest.startswith(_BEGIN) or _BEGIN.startswith(rest)):
            self._refuse("it ends in a text that is no result")
        out.truncate(sum(len(line) + 1 for line in lines))
        return found

    def _read(self, out: IO[bytes]) -> tuple[list[bytes], bytes]:
        """The lines that are whole, and what follows them."""
        out.seek(0)
        *lines, rest = out.read().split(b"\n")
        return lines, rest

    def _check(self, no: int, result: Result, n_lines: int) -> None:
        """Raises BatchError when a line has no result of these requests, or one of another record."""
        index: int = result.get("index", -1)
        if not 0 <= index < self.n_requests or result["of"] != _digest(self._lines[index]):
            if n_lines > self.n_requests:
                self._refuse(f"it holds {n_lines} results of {self.n_requests} requests")
            self._refuse(f"line {no} is no result of request {no} (or that was changed since)")
        if self._record and result.get("by") != self._record["by"]:
            self._refuse(f"line {no} was answered otherwise: {_difference(result.get('by'), self._record['by'])}")

    def _refuse(self, why: str) -> NoReturn:
        raise BatchError(f"{self.path}: {why}: name another file for the results, or remove this one")

    def _put_in_order(self) -> None:
        """Put the results in the order of their requests: those of requests that were tried again stand at the end."""
        lines, _ = self._read(self._out)
        latest = {json.loads(line)["index"]: line for line in lines}
        if list(latest) == list(range(len(lines))):
            return
        with AtomicFile(self.path) as file:
            file.file.writelines(latest[i] + b"\n" for i in sorted(latest))


def _loaded(line: bytes) -> Result:
    """The result that a line has; empty when it has none."""
    try:
        result = json.loads(line)
        return result if type(result["index"]) is int and type(result["of"]) is str else {}
    except (ValueError, TypeError, LookupError, RecursionError):
        return {}


def _difference(was: Any, now: Mapping[str, Any]) -> str:
    """In which ways two records differ, in words."""
    if not isinstance(was, Mapping):
        return "it does not say by which model, and with which options"
    said: list[str] = []
    was = cast("Mapping[str, Any]", was)
    if was.get("model") != now.get("model"):
        said.append("by another model")
    both: list[dict[str, Any]] = [record.get("options") or {} for record in (was, now)]
    before, options = both
    for name in sorted(before.keys() | options.keys()):
        if before.get(name) != options.get(name):
            texts = [f"{o[name]!r:.40}" if name in o else "its default" for o in both]
            said.append(f"with {name} {texts[0]}, which is {texts[1]} now")
    return ", ".join(said) or "with another record"


def _digest(line: bytes) -> str:
    return sha256(line).hexdigest()[:16]


def _parsed(line: bytes) -> Any:
    """The request in a line, or the error when the line is wrong."""
    try:
        return json.loads(line, parse_constant=_number, parse_float=_number)
    except RecursionError:
        return BatchError("no JSON: nested too deep")
    except ValueError as e:
        return BatchError(f"no JSON: {e}")


def _number(text: str) -> float:
    """A number that JSON has. Raises ValueError for NaN, for Infinity, and for one beyond all floats (1e999)."""
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text:.40} is no finite number")
    return value
