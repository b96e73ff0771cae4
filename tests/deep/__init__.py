"""Attacks that take longer than a test may: run by hand, one at a time or all, from the checkout:

    PYGGML_DEEP=5000 python -m pytest -s tests/deep/deep_files.py

Plain `pytest` does not collect deep_*.py. Each prints what came of its cases. PYGGML_DEEP (200) says how many there are
of each kind, PYGGML_DEEP_SECONDS (60) how long a test of no count goes on (signals, threads, caches),
and PYGGML_DEEP_SEED (0) which cases: case i has the seed PYGGML_DEEP_SEED + i.
"""

from __future__ import annotations

import os

COUNT = int(os.environ.get("PYGGML_DEEP", "200"))
SECONDS = float(os.environ.get("PYGGML_DEEP_SECONDS", "60"))
SEED = int(os.environ.get("PYGGML_DEEP_SEED", "0"))
