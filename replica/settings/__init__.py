"""The options of a replica, and the configuration that they make together."""
