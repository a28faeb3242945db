"""Responses of a router, asked for by commands and drawn for people."""
