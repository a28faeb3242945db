"""Attacks: what a client, a replica or a neighbour may do to the system, and what must not happen then."""
