"""How ranks start and meet: whoever started them, and the commands that start them."""
