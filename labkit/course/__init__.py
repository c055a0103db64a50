"""Course material used by the labs: self-grading exercises, claims that are tested, and teaching pictures.

This package never imports front ends.
"""
