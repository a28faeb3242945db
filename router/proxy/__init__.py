"""Requests on their way: from a client to replicas, and the answer back."""
