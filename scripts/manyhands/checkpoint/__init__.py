"""Checkpoints, and exported models."""
