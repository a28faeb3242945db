"""The HTTP front, the prefix index, the routing policy and the dashboard."""
