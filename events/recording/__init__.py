"""Recordings of streams: written, read, played again, and without the prompts in them."""
