"""Denoisers of a network on a device: the same laws, laid out for it."""
