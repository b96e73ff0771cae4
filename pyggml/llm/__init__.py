"""The runtime around a model: loading, batches, decoding, text generation."""
