"""Placement of requests: pure decisions over prompts, caches and loads."""
