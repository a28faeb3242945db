"""Attacks by clients, replicas and neighbours, and the damage that they must not cause."""
