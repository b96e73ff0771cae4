"""The unit tests file by file, with a table of the counts: for an emulated machine, where all of them take hours.

Run by `tests/arm.sh FOLDER --each SECONDS FILE ...`, in the order of the files. Each runs in a fork of this process, so
that Python and the library are imported once. A file that takes more CPU time than SECONDS is stopped, as is one
that takes ten times as long by the clock; what it had done until then is counted. Rows of the table (FOLDER/counts.tsv)
are kept: files that it has for this level are left out, so that the same command goes on where it was stopped. Delete
a row to run its file again. What pytest wrote is in FOLDER/logs.
"""

import contextlib
import importlib
import os
import resource
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from pyggml.backends.cpu import isa_levels

COLUMNS = ("file", "level", "passed", "failed", "skipped", "seconds", "finished")
SHARED = ("hypothesis.extra.numpy", "pyggml.llm", "pyggml.models", "pyggml.testing.plugin", "pyggml.tools.cli")


class Outcomes:
    """A plugin of pytest that writes a line per test, which the parent finds even when the child was killed."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w", buffering=1)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self.file.write(report.outcome + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.file.write(report.outcome + "\n")


def child(file: str, seconds: int, outcomes: Path, log: Path) -> int:
    """Run one file. Returns pytest's status."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(to, 1)
    os.dup2(to, 2)
    arguments = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning", file]
    return int(pytest.main(arguments, plugins=[Outcomes(outcomes)]))


def run(file: str, seconds: int, log: Path) -> tuple[Counter[str], float, bool]:
    """Run one file in a fork. Returns the number of tests by outcome, the CPU time, and whether all of them ran."""
    outcomes = log.with_suffix(".outcomes")
    outcomes.write_text("")
    pid = os.fork()
    if pid == 0:
        status = int(pytest.ExitCode.INTERNAL_ERROR)
        try:
            status = child(file, seconds, outcomes, log)
        finally:
            os._exit(status)
    end = time.monotonic() + 10 * seconds
    while not (ended := os.wait4(pid, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what its tests have left
    if not ended[0]:
        ended = os.wait4(pid, 0)
    used = ended[2].ru_utime + ended[2].ru_stime
    return Counter(outcomes.read_text().split()), used, os.WIFEXITED(ended[1]) and os.WEXITSTATUS(ended[1]) in (0, 1, 5)


def main(folder: Path, seconds: int, files: list[str]) -> None:
    table = folder / "counts.tsv"
    level = list(isa_levels())[-1]
    if not table.exists():
        table.write_text("\t".join(COLUMNS) + "\n")
    done = {tuple(row.split("\t")[:2]) for row in table.read_text().splitlines()}
    logs = folder / "logs" / level
    logs.mkdir(parents=True, exist_ok=True)
    for module in SHARED:
        importlib.import_module(module)
    for file in files:
        if (file, level) in done:
            continue
        counts, used, finished = run(file, seconds, logs / (file.replace("/", "-") + ".log"))
        row = [file, level, *(counts[outcome] for outcome in COLUMNS[2:5]), round(used), "yes" if finished else "no"]
        with table.open("a") as rows:
            print(*row, sep="\t", file=rows)
        print(*row, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
