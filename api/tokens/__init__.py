"""From text to token ids and back: a model's tokenizer.json, and what can be said of it."""
