"""Prompts: read from a request, tokenized, and remembered."""
