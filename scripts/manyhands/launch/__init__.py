"""How ranks start, meet and end, what machine they run on, and what a run leaves: folder, numbers, words."""
