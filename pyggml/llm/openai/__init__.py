"""Completions and chats in the shapes of OpenAI's API, and the tool calls of each family of models."""
