"""Text from a context: one, many, speculative, chats; templates, the prompt cache, long contexts."""
