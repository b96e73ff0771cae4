"""The same on Ray, with processes that are killed; skipped where it is not installed."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import pyggml as gg
from pyggml.cluster.on_ray import RayActors
from pyggml.cluster.run import batch_on
from pyggml.errors import BackendError, ModelError
from pyggml.llm.model import Model, load_model

REQUESTS: list[Any] = [{"prompt": "Once upon a time", "n_predict": 1 + i % 7, "id": i} for i in range(24)]


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModelError, match=r"pip install pyggml\[ray\]"):
        RayActors()


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_processes_that_are_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray.util", reason="Ray is not installed")

    def note(model: Model) -> None:
        (tmp_path / str(os.getpid())).touch()

    want = list(gg.batch(load_model(), REQUESTS, temp=0.0))
    with pytest.raises(BackendError, match="Ray at"):
        RayActors("127.0.0.1:1")
    with RayActors(n_cpus=2) as actors:
        assert sum(n.n_cpus for n in actors.nodes()) == 2
        for kind in ({"workers": 2}, {"stages": 2}):
            results = batch_on(actors, None, REQUESTS, n_parallel=3, temp=0.0, prepare=note, **kind)
            found = [next(results)]
            before = list(tmp_path.iterdir())
            os.kill(int(before[0].name), signal.SIGKILL)
            found += results
            assert found == want
            assert len(list(tmp_path.iterdir())) == 3
            for file in tmp_path.iterdir():
                file.unlink()
