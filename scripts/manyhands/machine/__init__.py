"""The machine that a process runs on: cores, limits, processes. Imports nothing of ours, and no torch."""
