"""Lab 20: a script with five faults that make it slow."""
