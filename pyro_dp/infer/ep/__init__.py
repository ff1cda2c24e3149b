"""DPSEP: private stochastic expectation propagation."""
