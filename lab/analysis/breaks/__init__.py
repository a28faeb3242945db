"""Finds prompts that differ early, by the text in a log."""
