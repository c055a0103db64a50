"""Launches runs: the job, the supervisor, the local launcher, and the warm server.

It never imports front ends or torch; only the warm server loads torch.

- `launch/local.py`: the engine of this machine: Spec → argv, environment, working folder, a plain value
- `launch/job.py`: `Job`: start, attach, wait, stop, from any process of the same user; the start of watchdog and
  supervisor, warm or cold, and the lifeline
- `launch/supervisor.py`, `launch/watch.py`: a small process in its own session that starts torchrun, keeps
  `status.json` up to date, takes samples from outside the ranks (NVML, psutil), reports ranks that cannot report
  themselves (stopped, holding the GIL, or dead), notices that the folder was deleted, moved or emptied, and ensures
  that no process is left
- `launch/warm/`: the warm server, which forks the processes of a run, and the one that traces; its modules are listed
  in `launch/warm/__init__.py`
- `launch/ending.py`: summary and final status, for which disk space is reserved when the run starts
- `launch/watchdog.py`: what ends a run whose supervisor was killed: a shell that waits, the program that it then starts
  (in `launch/ending.py`), and the removal of sockets and shared memory
- `launch/ras.py`: what NCCL's RAS service says about ranks that wait
- `launch/leases.py`: the queue for GPUs and CPU slots

`launch/schedulers.py` has the engines that submit a run. The launch plan of Slurm has the same form, and its command is
`launch/slurm_agent.py`, which follows a submitted job through Slurm's commands. Supervisor, stop and summary are
therefore those of any run. The ranks redirect their own output (`LABKIT_LOGS`), because torchrun knows only their
number on its node. Kubeflow's is the same with `launch/kubeflow_agent.py`, through Kubeflow's SDK; its pods share no
files with this machine, so that the agent copies what they print, and no events come back. `follow_again` starts a new
supervisor for a job that has lost its own, after it has checked that the job is that of the folder's batch file, or
names the folder in an annotation. A run on several machines is a plan with a `Node`
(`plan/nodes.py`) on each of them; nothing else differs, and `runs/gathering.py` puts the folders together. Nodes know
each other by the addresses that `setup/machine.py` finds, because the name of a host often means nothing to another
one, or is its own loopback address. `RunState.expected` is the number of ranks whose events a folder has;
`probe/hosts.py` records on which hosts the others are, refuses to train with different software, and ends a rank when
another node has been silent for too long, and torchrun then restarts or ends the run. `check_sizes` in `runs/handle.py`
refuses an elastic run that does not work with every number of nodes; `analysis/summary.py` says when nodes met, and
`analysis/profiled.py` how far the clocks of hosts are apart. `plan/nodes.py` has the command of each node for the
panel.

`launch/leases.py` is the queue for GPUs and CPU slots: a ticket is a lock that the supervisor holds and a description
that others read, and the order is that of the tickets. The supervisor takes the lease before it starts torchrun;
`setup/limits.py` reads the limits, `launch/job.py` keeps the one of the disk.

Five decisions determine its design.

- The standard input of the supervisor is a lifeline: a pipe whose other end the kernel or terminal holds, which ends
  a run when its starter dies for whatever reason. (A detached run has none. The user's standard input, if the ranks
  are to have it, is passed as another descriptor.)
- A watchdog ends a run whose supervisor is killed. It is a shell that is blocked on a pipe whose other end only the
  supervisor holds, and until the run has a status its starter, too. The kernel closes the pipe with the last of them,
  at whatever moment; a line in it releases the shell when the run has ended. It is started before the supervisor,
  which leaves no moment without it, and starts Python only if there is something to end.
- There is one stop: the button, `labkit stop`, Ctrl-C and a kernel interrupt all ask the supervisor, which asks
  torchrun, waits two seconds, and then kills every process that still has the tag.
- Nothing listens beyond loopback: `torchrun --standalone` would open its store on every interface. Therefore the
  ranks find each other through a file, and the probe binds their store to 127.0.0.1, on a port of the system's choice
  that the other ranks read in the run folder (a port that torchrun found free may be taken seconds later).
- The summary is written before the final state: a reader that sees the end also finds the figures.

Warm and cold. `Job.start` asks the warm server whether it can start the run, and starts the supervisor itself if it
cannot. The server forks the supervisor, which forks torchrun's own agent (`torch.distributed.run.main`, in which two
functions are replaced: the one that starts the process of a rank, and one that names the caller of a function, at a
high cost), which forks the ranks. Argv, script, events, restarts and exit codes are those of a cold start, and the
same tests run both ways (the fixture `start`). `launch/warm/client.py` decides whether a warm start could make a
difference, by what a process inherits or reads while it imports; `launch/warm/fork.py` gives a forked process its own
arguments, environment, descriptors, streams, signals, random numbers and names, including those that `ps` and the
run's tag are read from. `tests/scripts/sees.py` prints all that a script can see of itself, and the two outputs must
be equal. Only the seed of `hash(str)` is the same for all warm ranks, because an interpreter cannot change it:
scripts that could depend on it start cold (`dependence` in `launch/warm/client.py`). A
start takes two messages, which ensures that a stopped server starts nothing after its client has started cold.
Forking is safe because the server has one thread (otherwise it terminates itself) and never uses CUDA. Nor does the
forked agent: torchrun's launch configuration asks for GPUs, which would initialise CUDA before the ranks are forked,
and is answered that there are none. The server measures about 310 MB; the data come from the cache
(`training/workloads/digits.py`), without loading scikit-learn.

Which process ends with which. On Linux the kernel kills torchrun's agent when the supervisor dies, and the ranks when
the agent dies (`probe/lifetime.py`). Each parent passes its pid and start time to its children, and a child that
finds a different parent terminates itself: at no moment does SIGKILL leave a rank behind, which
`tests/bench/kills.py` tests at early moments, and `tests/bench/killed_training.py` in a run that trains and saves.
The supervisor adopts orphans of the run, and thereby also finds processes that cleared their environment and left
their session. A folder that is deleted, moved or emptied during the run ends the run.

What the kernel does not end, such as data loader workers and all processes on macOS, the watchdog finds by the tag of
the run. It also removes what they leave outside of the run folder, and writes summary and final status.
`launch/watchdog.py` removes it at the end of every run: the folder for the sockets of multiprocessing, which all ranks
of a run share, and the shared memory that torch names after the process that created it. This folder is in the user's
own (`common/files.py`), because the path of a socket must be short, and its name is a hash of the path of the run
folder, so that no file decides what is removed. The tag of a watchdog names no folder. The watchdog is therefore a
process of no run, and what ends a run does not end its watchdog.

`failed` means that this host knows the run to be over; `lost` is a run of another host (or of another boot or
container) without an event for two minutes, or a copy of a folder whose run is under way elsewhere. Two cases remain:
a process that hides its tag survives if the supervisor is killed before it; and if supervisor and watchdog are killed
at once, what the kernel does not end survives until `wait` or `labkit stop` finds it by its tag.
"""
