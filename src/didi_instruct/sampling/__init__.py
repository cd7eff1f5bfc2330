"""Samplers as free functions: from a denoiser to text, by exact draws."""
