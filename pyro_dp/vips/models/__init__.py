"""Models for VIPS, and their parts."""
