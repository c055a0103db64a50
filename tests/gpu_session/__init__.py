"""Everything that only GPUs can show, in one session of 25 minutes: `python3 -m labkit test --gpu`.

`__main__` prepares the environment and runs the parts one after another, each in a process of its own that is ended at
its limit. `parts` is the table of the parts, in the order of their value, and what each of them does; `measure` is what
they share. `report` writes `report.jsonl`, a line per case as soon as it is known, and `report.md`, a page made of it.
A session that is killed leaves both, and another one with the same folder does what is left.
"""
