"""The disk tier's file: its records, its folder, and what can still be found in it."""
