"""The probe: `python -m labkit.probe SCRIPT [ARGS…]` runs an unmodified training script and writes what it does as events.

`torchrun … -m labkit.probe train.py` runs it in every worker. Where LABKIT_RUN_DIR is not set it only runs the script.

=============== =====================================================================================
`__main__`      asks to die with the launcher, then hands over
`runner`        the script as `__main__`, exactly as python would run it; its errors; the way out
`journal`       the rank's events, written by something that never raises
`hooks`         torch's global hooks, and who is told by them
`steps`         from what the hooks saw to steps and phases
`clocks`        time on the CPU, time on a CUDA stream: one interface
`memory`        bytes of live tensors by owner
`sampler`       looks closely at few steps, through torch's profiler
`timeline`      from what that saw to a timeline and a curve of memory
`observations`  what only shows when ranks are laid side by side
`waiting`       a thread that notices when nothing goes on
`tensors`       gradients and parameters into files, where LABKIT_TENSORS=1
`traffic`       bytes that ranks exchange, by operation
`loopback`      the workers' store listens on this machine only, on a port that nobody else has
=============== =====================================================================================
"""
