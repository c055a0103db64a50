"""The probe: `python -m labkit.probe SCRIPT [ARGS…]` runs an unmodified training script and records its behaviour as
events.

`-m MODULE` instead of SCRIPT runs a module as `python -m MODULE` does.

`torchrun … -m labkit.probe train.py` runs it in every worker. Without LABKIT_RUN_DIR it only runs the script. From
labkit, the probe imports only the event writer (`record`).

=================== ==================================================================================================
`__main__`          binds the rank to the launcher, then starts the runner
`lifetime`          ties the lifetimes of a run's processes together with kernel signals (Linux)
`runner`            finds the script's code and runs it as `__main__` exactly as python does; reports errors
`leaving`           ends the process as python does
`journal`           writes the rank's events and never raises
`parts`             the parts that can be lost one by one, and what is not measured without each
`torch_private`     the private names of torch that the probe relies on
`patches`           installs and removes all wrappers and hooks
`hooks`             decides what they call
`backward`          calls of backward, and gradient scalers
`threads`           selects the thread of the script that is followed; processes that the script starts
`untraced`          keeps torch.compile from tracing the probe
`steps`             turns hook calls into steps and phases, and writes each once the device has finished it
`losses`            the loss of a step, per optimizer
`samples`           the number of samples of a step, and facts that are compared across ranks
`optimizers`        the script's optimizers, which of them paces the steps, and updates that no hook reports
`clocks`            one interface for CPU time and CUDA stream time
`memory`            bytes of live tensors by owner, those that outlive a step, and what the C library keeps
`sampler`           profiles a few steps with torch's profiler
`timeline`          turns a profile into a timeline and a memory curve
`startup`           milestones of a rank before its first step
`replicas`          threads of `nn.DataParallel`
`waiting`           a thread that detects when the script makes no progress
`position`          the script's position in files that outlive the process: for crashes, kills, endless C calls
`tensors`           writes gradients and parameters to files if LABKIT_TENSORS=1
`traffic`           bytes exchanged between ranks, by operation, from torch's flight recorder
`hosts`             several nodes: the store on loopback, the hosts of all ranks, nodes that are cut off
`link_times`        a script of its own: times collectives, for `labkit doctor --calibrate`
=================== ==================================================================================================
"""
