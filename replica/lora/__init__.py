"""LoRA adapters: read from files, computed beside the model, loaded and unloaded while requests run."""
