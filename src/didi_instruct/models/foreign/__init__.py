"""Public checkpoints of the DiT family: recognised, read without running them, and written."""
