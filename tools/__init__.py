"""The command line, with one verb per file, and the tools that the verbs use."""
