"""Connections of publishers and followers, in plain text or encrypted, and what each peer may cost."""
