"""Steps before and around a fit: scaling, and the choice of settings."""
