"""`python -m pyggml.tools.measure.training`."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyggml.tools.measure.training import main


@pytest.mark.parametrize("options", [[], ["--lora", "2", "--checkpoint"]], ids=" ".join)
def test_steps_and_ops(tiny: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tiny), "--texts", "2", "--tokens", "16", "--steps", "1", *options])
    steps, *ops, memory = capsys.readouterr().out.splitlines()
    assert "tokens/s" in steps and memory.startswith("peak memory")
    assert any(line.startswith("flash_attn_ext_back") for line in ops)
