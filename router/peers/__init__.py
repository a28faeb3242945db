"""Routers tell each other what they send where: over ZeroMQ, a few milliseconds at a time."""
