"""LoRA adapters and control vectors, which change a model and leave its weights as they are."""
