"""Before anything runs: the environment (`bootstrap`, `environment`), what torch answers (`preflight`), what this machine has (`machine`).

`bootstrap`, `environment` and `progress` use the standard library only. It never imports rooms other than `common`.
"""
