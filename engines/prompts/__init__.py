"""Prompts as other engines build them from a request: one file per engine, and the parts that they share."""
