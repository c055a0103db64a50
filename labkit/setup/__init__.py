"""Setup before a run: the Python environment (`environment`), what a run needs (`preflight`), this machine (`machine`).

From labkit, only `common` is imported. `__main__.py`, `setup/environment.py` and `setup/progress.py` use the standard
library only, because nothing else may be installed yet. `setup/environment.py` determines what is missing, uses the
active environment, completes it, or creates `.venv`, and never replaces a working torch. `setup/preflight.py` checks
what a run needs besides: packages, a compiler, data that are on this machine or can be downloaded, and torch, in
separate processes, because importing it may fail, crash or hang. `setup/machine.py` asks NVML and psutil, never CUDA.
`setup/jupyter/` contains the setting that opens `.py` lessons as notebooks.
"""
