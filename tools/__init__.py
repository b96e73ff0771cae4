"""The command line, one verb per file, and the tools behind it."""
