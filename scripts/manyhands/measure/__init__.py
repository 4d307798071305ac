"""Measure bytes on the wire, spans of time and tensors in memory; and simulate a network."""
