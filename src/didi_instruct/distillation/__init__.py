"""Distillation: a teacher of many steps becomes a student of few."""
