"""What has nothing to do with privacy or Pyro: errors, validation, linear algebra, files."""
