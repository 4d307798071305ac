"""What a run of the trainer is asked to do, and whether it can be done."""
