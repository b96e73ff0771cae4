"""GGUF files: read, written, and never seen half."""
