"""The probe: `python -m labkit.probe SCRIPT [ARGS…]` runs an unmodified training script and records its behaviour as
events.

`-m MODULE` instead of SCRIPT runs a module as `python -m MODULE` does.

`torchrun … -m labkit.probe train.py` runs it in every worker. Without LABKIT_RUN_DIR it only runs the script. From
labkit, the probe imports only the event writer (`record`).

=================== ==================================================================================================
`__main__`          binds the rank to the launcher, then starts the runner
`lifetime`          ties the lifetimes of a run's processes together with kernel signals (Linux); ends the process as
                    python does
`runner`            finds the script's code and runs it as `__main__` exactly as python does; reports errors
`journal`           writes the rank's events and never raises; keeps torch.compile from tracing the probe
`torch_private`     the private names of torch that the probe relies on, and what is not measured without each part
`patches`           installs and removes all wrappers and hooks
`hooks`             decides what they call; calls of backward, and gradient scalers
`threads`           selects the thread of the script that is followed; processes that the script starts; threads of
                    `nn.DataParallel`; detects when the script makes no progress, and keeps its position in files that
                    outlive the process: for crashes, kills, endless C calls
`steps`             turns hook calls into steps and phases, and writes each once the device has finished it;
                    milestones of a rank before its first step
`samples`           the number of samples of a step, and facts that are compared across ranks
`optimizers`        the script's optimizers, which of them paces the steps, updates that no hook reports, and the loss
                    of a step for each of them
`clocks`            one interface for CPU time and CUDA stream time
`memory`            bytes of live tensors by owner, those that outlive a step, and what the C library keeps
`sampler`           profiles a few steps with torch's profiler
`timeline`          turns a profile into a timeline and a memory curve
`tensors`           writes gradients and parameters to files if LABKIT_TENSORS=1
`traffic`           bytes exchanged between ranks, by operation, from torch's flight recorder
`hosts`             several nodes: the store on loopback, the hosts of all ranks, nodes that are cut off
`cells`             the script of ranks that stay: runs the cells that a notebook sends
`values`            tensors and plain values as data, without pickle, for `cells` and the notebook
`link_times`        a script of its own: times collectives, for `labkit doctor --calibrate`
=================== ==================================================================================================

`python -m labkit.probe train.py` (or `-m package.module`) runs an unmodified script and observes it through torch's
own hooks (`probe/hooks.py`): optimizer steps, outermost forwards, backward, data loaders, `torch.monitor`. A part of
the probe that fails is switched off and recorded once (`probe_error`); the script and the other parts continue.

Everything that the probe replaces or registers is in one table, and is installed and removed in one place
(`probe/patches.py`), each function guarded on its own. The private names of torch are in another table
(`probe/torch_private.py`), each with the part that is lost without it and what is then not measured, which a finding
repeats. `tests/probe/test_torch_private.py` renames one name at a time and expects exactly that part to be lost.

Profiled steps. `probe/sampler.py` runs torch's profiler for one step in fifty, for an early one, and for those that
`capture.json` requests; `probe/sampler.py` reads its results. `probe/timeline.py`, pure functions over plain rows,
computes a timeline from it (what computes, what sends, what is exposed) and, from the allocations of the step and a
census before it, a curve of memory by owner. Four problems are worked around: kineto crashes if the garbage collector
frees an old result during a new profile, therefore results are freed at once; glibc keeps most of what they took, and
the process would grow, therefore `probe/memory.py` returns it to the system; the CPU allocator warns of every block
that is older than the profile, therefore torch's log level is raised for that step; and a block that a gloo thread
frees is not reported, therefore an address that is allocated again counts as freed. When a rank starts,
`probe/memory.py` also makes glibc keep what a step frees for the next one. Otherwise it would do so from some step
on, or never, depending on what else was freed: a warm run of the CNN took 80 ms per step, and a cold one 92.
`probe/samples.py` notes what only a comparison of ranks shows (digests of first batches, epochs of samplers, paths of
saved files).

Hangs and crashes. `WaitWatch` in `probe/threads.py` notices a lack of progress, and writes stacks and collectives
while it lasts. `Position` serves the cases in which this thread cannot run: it keeps the current line in a small file,
and faulthandler writes the stacks at a fatal signal, or when a C call has held the GIL for too long. `os._exit` is
wrapped, which reports even this exit with its line.
"""
