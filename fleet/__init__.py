"""Many replicas: the controller, the processes that it keeps, and the `warmroute` command."""
