"""The replicas: what each is told, says of itself, and how healthy it is."""
