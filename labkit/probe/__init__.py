"""The probe: `python -m labkit.probe SCRIPT [ARGS…]` runs an unmodified training script and records its behaviour as
events.

`-m MODULE` instead of SCRIPT runs a module as `python -m MODULE` does.

`torchrun … -m labkit.probe train.py` runs it in every worker. Without LABKIT_RUN_DIR it only runs the script. From
labkit, the probe imports only the event writer (`record`).

=================== ==================================================================================
`__main__`          binds the rank to the launcher, then starts the runner
`lifetime`          ties the lifetimes of a run's processes together with kernel signals (Linux)
`runner`            runs the script as `__main__` exactly as python does; reports errors
`script`, `leaving` find the script's code as python does; end the process as python does
`journal`           writes the rank's events and never raises
`parts`             the parts that can be lost one by one, and what is not measured without each
`torch_private`     the private names of torch that the probe relies on
`patches`           installs and removes all wrappers and hooks
`hooks`             decides what they call
`groups`            callbacks before the script destroys its process groups
`backward`          calls of backward, and gradient scalers
`threads`           selects the thread of the script that is followed
`untraced`          keeps torch.compile from tracing the probe
`activity`          what the rank does now, and the phases of the current step
`finished`          what is recorded when a step ends
`steps`             turns hook calls into steps and phases
`losses`            the loss of a step, per optimizer
`pace`              selects the optimizer whose steps are the steps of the run
`pending`           steps that the device has not finished yet
`samples`           the number of samples of a step
`optimizers`        the script's optimizers, and updates that no hook reports
`elsewhere`         processes that the script starts, which are not monitored
`clocks`            one interface for CPU time and CUDA stream time
`memory`, `held`    bytes of live tensors by owner
`sampler`           profiles a few steps
`kineto`            torch's profiler for one step
`heap`              returns the memory that a profile has freed to the system
`snapshots`         torch's record of the CUDA allocator in a profiled step
`timeline`          turns a profile into a timeline and a memory curve
`startup`           milestones of a rank before its first step
`observations`      facts that are compared across ranks
`replicas`          threads of `nn.DataParallel`
`waiting`           a thread that detects when the script makes no progress
`position`          the script's position in files that outlive the process: for crashes, kills, endless C calls
`tensors`           writes gradients and parameters to files if LABKIT_TENSORS=1
`collectives`       reads collectives from torch's flight recorder
`traffic`           bytes exchanged between ranks, by operation
`loopback`          binds the workers' store to this machine, on a free port
`link_times`        a script of its own: times collectives, for `labkit doctor --calibrate`
=================== ==================================================================================
"""
