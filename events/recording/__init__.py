"""Recordings of streams: written, read, and without the prompts in them."""
