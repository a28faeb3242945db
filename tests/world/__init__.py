"""One world from one seed: the shipped router, replicas, clients and faults in one process, in virtual time."""
