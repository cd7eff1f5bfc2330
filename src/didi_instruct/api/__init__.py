"""What `import didi_instruct` offers: models by source, and runs as functions."""
