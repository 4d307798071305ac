"""Distribute a model of one process over many, by any of the strategies."""
