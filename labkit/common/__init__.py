"""Helpers for all packages: argument checks (`arguments`), escaping of text (`text`), formatting of numbers (`units`),
and the processes of runs (`processes`).

It never imports another package of labkit.
"""
