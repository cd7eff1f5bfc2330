"""The noise processes: schedules, masking, uniform-state diffusion."""
