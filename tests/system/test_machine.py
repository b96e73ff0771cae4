"""Machines and Pythons that pyggml says no to, by name."""

from __future__ import annotations

import pytest

from pyggml.system.machine import check_machine


@pytest.mark.parametrize(
    ("what", "value", "text"),
    [
        ("byteorder", "big", "big-endian"),
        ("maxsize", 2**31 - 1, "64 bits"),
        ("version", "3.14.0 free-threading build (main, Oct  7 2025)", r"free-threaded Python yet: use python3\.\d+,"),
    ],
)
def test_what_it_does_not_run_on(monkeypatch: pytest.MonkeyPatch, what: str, value: object, text: str) -> None:
    check_machine()
    monkeypatch.setattr(f"sys.{what}", value)
    with pytest.raises(ImportError, match=text):
        check_machine()
