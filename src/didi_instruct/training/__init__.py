"""One loop for every objective, and the pretraining objectives."""
