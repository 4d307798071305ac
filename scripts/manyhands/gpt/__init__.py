"""The model, and what it says. Imports nothing of ours."""
