"""Models that VIPS has ready, and what they are made of."""
