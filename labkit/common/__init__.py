"""Helpers for all packages: argument checks (`arguments`), escaping of text (`text`), formatting of numbers (`units`),
the processes of runs (`processes`), and atomic writing of files (`atomic`).

It never imports another package of labkit.
"""
