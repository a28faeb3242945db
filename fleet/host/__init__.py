"""One replica's process: its command, its child, and whether it works."""
