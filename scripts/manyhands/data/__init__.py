"""From a text to the batches of each rank."""
