"""The probe: `python -m labkit.probe SCRIPT [ARGS…]` runs an unmodified training script and records its behaviour as
events.

`-m MODULE` instead of SCRIPT runs a module as `python -m MODULE` does.

`torchrun … -m labkit.probe train.py` runs it in every worker. Without LABKIT_RUN_DIR it only runs the script. From
labkit, the probe imports only the event writer (`record`).

=============== ===================================================================================== `__main__`
binds the rank to the launcher, then starts the runner `lifetime`      ties the lifetimes of a run's processes together
with kernel signals (Linux) `runner`        runs the script as `__main__` exactly as python does; reports errors; exits
`startup`       milestones of a rank before its first step `journal`       writes the rank's events and never raises
`hooks`         installs torch's global hooks `groups`        callbacks before the script destroys its process groups
`backward`      calls of backward, and gradient scalers `threads`       selects the thread of the script that is
followed `untraced`      keeps torch.compile from tracing the probe `steps`         turns hook calls into steps and
phases `losses`        the loss of a step, per optimizer `pace`          selects the optimizer whose steps are the steps
of the run `pending`       steps that the device has not finished yet `samples`       the number of samples of a step
`optimizers`    the script's optimizers, and updates that no hook reports `elsewhere`     processes that the script
starts, which are not monitored `clocks`        one interface for CPU time and CUDA stream time `memory`        bytes of
live tensors by owner `sampler`       profiles a few steps with torch's profiler `timeline`      turns a profile into a
timeline and a memory curve `observations`  facts that are compared across ranks `waiting`       a thread that detects
when the script makes no progress `position`      the script's current position in files that outlive the process: for
crashes, kills, C calls that hold the GIL `tensors`       writes gradients and parameters to files if LABKIT_TENSORS=1
`traffic`       bytes exchanged between ranks, by operation `loopback`      binds the workers' store to this machine, on
a free port =============== =====================================================================================
"""
