"""A plugin of pytest: profiles of hypothesis for tests of kernels. A conftest asks for it with
`pytest_plugins = ["pyggml.testing.plugin"]`.

    pyggml           100 examples
    pyggml-quick     10 examples
    pyggml-thorough  5000 examples, for a night

The plugin chooses `pyggml`; `pytest --hypothesis-profile pyggml-thorough` chooses another one. Each run draws new
examples; when the environment has CI, each draws the same ones. No profile has a deadline: machines are shared.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

PROFILES = {"pyggml": 100, "pyggml-quick": 10, "pyggml-thorough": 5000}


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Called by pytest, before hypothesis loads the profile that its option names."""
    same = bool(os.environ.get("CI"))
    for name, n in PROFILES.items():
        settings.register_profile(name, deadline=None, max_examples=n, derandomize=same)
    settings.load_profile("pyggml")
