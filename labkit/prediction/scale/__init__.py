"""Closed-form estimates of training a transformer at any scale: memory, traffic and time of a layout, and advice.

Nothing is run or traced: every figure is modelled. This package never imports torch, launch or front ends.
"""
