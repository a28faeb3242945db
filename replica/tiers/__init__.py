"""Moves of blocks between the pool and the memory below it: who waits for them, and what carries them out."""
