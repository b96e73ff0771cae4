"""Many prompts on several machines: workers with a model each, or one model in stages. By Ray (`pyggml[ray]`)."""
