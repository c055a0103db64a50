"""What is taught next to the labs: exercises that check themselves, claims that are tested, teaching pictures.

It never imports front ends.
"""
