"""Helpers for all packages: argument checks (`arguments`), escaping of text (`text`), formatting of numbers (`units`),
the processes of runs (`processes`), atomic writing of files (`atomic`), and the cache folder (`cache`).

It never imports another package of labkit.
"""
