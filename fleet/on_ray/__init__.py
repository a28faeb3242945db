"""Hosts and controller as actors of Ray, and the child of `up` that starts or joins Ray."""
