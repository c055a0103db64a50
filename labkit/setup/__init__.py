"""Setup before a run: the Python environment (`bootstrap`, `environment`), what a run needs (`needs`, `preflight`),
this machine (`machine`).

`bootstrap`, `environment` and `progress` use only the standard library. From labkit, only `common` is imported.
"""
