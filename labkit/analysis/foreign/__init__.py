"""Files of jobs that ran anywhere, without the lab: what they are, what they say, and what follows from it.

`opening.py` recognises a file by its content and joins the files of the ranks. `chrome.py` reads a trace of torch's
profiler as a stream, `breakdown.py` says where the time of one rank went, `profiles.py` what the ranks of a job have in
common, `critical_path.py` what a step would take without a part of it, and `profiled_steps.py` writes the steps as
events of a run. `flight_recorder.py` reads the dumps that torch writes after a timeout, and says which rank is
missing in which collective; `debug_server.py` reads the stacks of torch's debug server, and `ras.py` reports of NCCL's
RAS service. `memory_events.py` reads snapshots of CUDA memory, `memory_replay.py` follows their events to the peak, and
`memory_snapshot.py` says what holds the memory, what grows and how fragmented it is. `logs.py` reads
what ranks, torchrun, Slurm and Kubernetes wrote, and `nccl.py` the lines of NCCL among it. `page.py` has what each of
them returns: findings, tables and sentences, for every front end, and events, from which `runs/gathering.py` makes a
run.

Every file is untrusted: readers have limits, execute nothing, and raise `ForeignError` with one sentence.
"""
