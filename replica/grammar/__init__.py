"""Constrained answers: constraints are compiled to grammars, and grammars say which tokens may come next."""
