"""Where a request goes: pure decisions over prompts, caches and loads."""
