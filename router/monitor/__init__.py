"""Keeps what is known of replicas up to date: which exist, what they serve, whether they are well."""
