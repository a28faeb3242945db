"""The router as a process: its command and settings, its start and end."""
