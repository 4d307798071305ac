"""A run: who takes part, what it says, where it leaves its files, and what is in them."""
