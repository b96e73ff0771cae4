"""Exit codes, besides 0 (done), 1 (failed) and 2 (usage)."""

INTERRUPTED = 130  # the exit code of a program that SIGINT ended
