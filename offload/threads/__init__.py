"""How many threads compute, and how they wait for each other."""
