"""Networks and their files on disk."""
