"""Read the trainer's options and check that they can be run."""
