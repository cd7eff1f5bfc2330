"""From a denoiser to text: exact draws and samplers as free functions."""
