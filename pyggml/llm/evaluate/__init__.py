"""What a text says of a model: perplexity, divergence from another, choices among answers, importance matrices."""
