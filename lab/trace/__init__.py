"""Requests as they were made: when, how long, and which blocks they share."""
