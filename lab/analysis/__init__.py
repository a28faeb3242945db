"""Analyzes how much a trace or log shares, what cache that takes, and what breaks it."""
