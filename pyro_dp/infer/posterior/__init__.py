"""Posteriors over latents, whatever inference found them: Gaussians, the guides that hold them."""
