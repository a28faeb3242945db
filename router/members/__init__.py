"""The replicas: their specs, their descriptions of themselves, their connections, events and health."""
