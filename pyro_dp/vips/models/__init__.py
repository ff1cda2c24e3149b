"""Models that VIPS has ready, and their parts."""
