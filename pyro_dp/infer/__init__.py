"""Private inference for Pyro models; one folder an algorithm."""
