"""Helpers without privacy or Pyro: errors, validation, linear algebra, files."""
