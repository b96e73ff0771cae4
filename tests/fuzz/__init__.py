"""Fuzzing: a harness for each parser that reads what strangers send, and one driver for all of them.

`python -m tests.fuzz replay` runs the corpus, and changes of it by fixed seeds: the same every time, in CI.
`python -m tests.fuzz explore` looks for new inputs by coverage, with atheris (libFuzzer). SECURITY.md shows how.
"""
