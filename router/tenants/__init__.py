"""API keys: their rights, their limits, and what each has used."""
