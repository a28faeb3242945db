"""A fleet in virtual time, with the shipped router, index, policies and block pool."""
