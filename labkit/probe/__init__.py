"""The probe: `python -m labkit.probe SCRIPT [ARGS…]` runs an unmodified training script and writes what it does as events.

`-m MODULE` in the place of SCRIPT runs a module as `python -m MODULE` does.

`torchrun … -m labkit.probe train.py` runs it in every worker. Where LABKIT_RUN_DIR is not set it only runs the script.

=============== =====================================================================================
`__main__`      binds the rank to the launcher, then hands over
`lifetime`      how the processes of a run are bound together: by signals of the kernel (Linux)
`runner`        the script as `__main__`, exactly as python would run it; its errors; the way out
`startup`       what a rank reaches on its way to the first step
`journal`       the rank's events, written by something that never raises
`hooks`         torch's global hooks, and who is told by them
`groups`        what is done before the script destroys its process groups
`backward`      calls of backward, and gradient scalers
`threads`       which thread of the script is followed
`untraced`      keeps torch.compile away from the probe
`steps`         from what the hooks saw to steps and phases
`losses`        the loss of a step, for each optimizer
`pace`          which of several optimizers makes the steps of the run
`pending`       steps until the device has finished them
`samples`       how many samples a step trains on
`optimizers`    the script's optimizers, and updates that none of their hooks reports
`elsewhere`     processes that the script starts, which are not watched
`clocks`        time on the CPU, time on a CUDA stream: one interface
`memory`        bytes of live tensors by owner
`sampler`       looks closely at few steps, through torch's profiler
`timeline`      from what that saw to a timeline and a curve of memory
`observations`  what only shows when ranks are laid side by side
`waiting`       a thread that notices when nothing goes on
`position`      where the script is, in files that outlive the process: for crashes, kills, and C calls that hold the GIL
`tensors`       gradients and parameters into files, where LABKIT_TENSORS=1
`traffic`       bytes that ranks exchange, by operation
`loopback`      the workers' store listens on this machine only, on a port that nobody else has
=============== =====================================================================================
"""
