"""A router in virtual time: a clock with its agenda, and the shipped placement with a row for each replica."""
