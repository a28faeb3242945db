"""Sources of replicas: the command line, a file, the fleet's registry, Kubernetes."""
