"""Prepare a text and draw each rank's batches from it."""
