"""Helpers for all packages. It never imports another package of labkit.

`common/arguments.py` has the checks of single values that all public functions share (`course/pictures/canvas.py`
applies them by annotation). `common/text.py` turns control characters, direction overrides and invisible characters
into visible escapes. It is applied at output: `frontends/console.py` for rich, `say` and `refuse` for commands,
`escape` for HTML. Tests ensure that no module prints, draws or escapes in another way. `common/processes.py`
determines which processes belong to a run, and terminates them: by their tag, the variable `LABKIT_RUN_DIR` in their
own environment, or as descendants of the supervisor, never by name or by the content of a file.
"""
