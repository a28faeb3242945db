"""Parses large bodies in separate processes, so that the router stays responsive."""
