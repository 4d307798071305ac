"""How ranks start, meet and end, what machine they run on, and what a run leaves: its folder, its numbers, its words."""
