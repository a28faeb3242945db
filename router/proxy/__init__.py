"""The path of requests: from a client to replicas, and the answer back."""
