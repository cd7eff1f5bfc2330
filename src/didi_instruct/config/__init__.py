"""Settings as dataclasses: no torch here."""
