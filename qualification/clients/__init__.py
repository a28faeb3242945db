"""Real clients, unmodified and of pinned versions, against a router before two replicas that compute.

`python -m qualification.clients DIR` sets them up in DIR, each in an environment of its own, runs them, and prints a
table. Where WARMROUTE_CLIENTS names DIR, pytest runs them too; elsewhere it skips them.
"""
