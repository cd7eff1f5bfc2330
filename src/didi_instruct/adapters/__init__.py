"""Low-rank adapters: several roles on one frozen network of `transformers`."""
