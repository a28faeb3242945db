"""LoRA adapters: read from files, computed beside the model."""
