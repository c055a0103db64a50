"""What follows from a RunState: figures of speed, summary, comparison, equivalence, traffic against formulas, profiled
steps, findings.

It never imports torch, `launch` or front ends.
"""
