"""Which replicas there should be: a list, a file, the fleet's registry, or Kubernetes."""
