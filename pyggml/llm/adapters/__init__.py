"""What changes a model without changing its weights: LoRA adapters and control vectors."""
