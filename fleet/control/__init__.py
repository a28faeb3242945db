"""The desired and the current state of a fleet, and the one controller that makes them equal."""
