"""A real model's files: where they are, what they say, and its weights."""
