"""The types of what a run folder holds: single values, events by kind, documents, and the summary.

mypy, the checks of the reader and the published JSON Schema use these definitions. A field that is written and read
needs a line here: other fields are dropped on reading. The annotations are evaluated, because `record/schema.py` reads
them. It never imports the code that reads or writes.
"""
