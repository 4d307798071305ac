"""Every strategy: a model on one process becomes one on many."""
