"""A class: what its learners have done, guessed and failed at, read from one folder, for `labkit class` and the panel
`classroom`.

`classroom/learners.py` reads one learner: a runs folder, or a zip of one that is never unpacked. Both may be hostile,
so everything is opened through `record/files.py` or read from the zip up to a limit, and checked by the Structs of
`record/documents.py`; a part that is damaged is left out and counted. Reading is incremental: what a run that is over
has left is read once. `classroom/overview.py` makes of all learners what a teacher looks at, as plain values, and puts
pseudonyms in place of names; `classroom/page.py` shows it as HTML.

What is shown without names must not have any, so only words of the lab itself get there: a strategy, a lab, a figure
or a finding that the lab knows, and numbers. Everything else in the files of a learner (paths, messages, the names of
scripts) may contain a name, and is shown together with names only.
"""
