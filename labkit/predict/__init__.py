"""Predictions of a run before it starts: how long its communication takes (`collectives`, `devices`, `link_table`,
`links`).

It never imports `launch` or front ends; these modules never import anything heavy either.
"""
