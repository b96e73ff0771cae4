"""Machines and Pythons that pyggml says no to, by name."""

from __future__ import annotations

import pytest

from pyggml.backends.cpu import isa
from pyggml.native import lib
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


def test_a_cpu_without_vectors_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class OldCPU:
        def __getattr__(self, name: str) -> object:
            return (lambda level: level == 0) if name == "pg_isa_supported" else getattr(lib, name)

    isa.isa_levels.cache_clear()
    monkeypatch.setattr(isa, "lib", OldCPU())
    try:
        with caplog.at_level("INFO", "pyggml"):
            assert [*isa.isa_levels()] == ["generic"]
    finally:
        isa.isa_levels.cache_clear()
    assert "AVX2" in caplog.text
