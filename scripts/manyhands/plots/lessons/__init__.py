"""One module per lesson: the figures that it shows from assets/."""
