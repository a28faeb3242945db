"""Beside a router of any kind: what warmroute would have decided, and gained, without touching traffic."""
