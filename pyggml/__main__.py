"""`python -m pyggml` is `pyggml`."""

from pyggml.tools.cli import main

main()
