"""Text from a context: one, many, speculative, chats; templates, perplexity, the prompt cache, long contexts."""
