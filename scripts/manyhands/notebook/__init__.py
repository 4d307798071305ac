"""The ranks of a notebook: start them, run cells on all of them, leave nothing behind."""
