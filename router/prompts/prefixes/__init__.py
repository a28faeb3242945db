"""Shared prefixes of recent prompts: remembered within bounds, made into a tree on request, and drawn."""
