"""DPSVI: private stochastic variational inference."""
