"""Rules that find problems and their remedies in the figures of a router and its replicas."""
