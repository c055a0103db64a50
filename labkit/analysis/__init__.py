"""What follows from a RunState: figures of speed, summary, comparison, equivalence, traffic against formulas, profiled
steps, findings.

It never imports torch, `launch` or front ends.

`analysis/metrics.py` has one definition of each figure of speed: which steps count (not the first of an attempt,
which is warm-up), the medians of a step and its phases, throughput, pace and time left. No other module computes a
median or reads the times of steps, which a test enforces; summary, comparison, claims, charts, findings and front
ends therefore show the same number. It relates the speed to the devices, too: FLOP/s and MFU. `analysis/summary.py`
puts the figures of a run into one dict, and `analysis/profiled.py` reads its profiled steps and writes them in Chrome's
format. `analysis/theory/` has what each strategy sends per step and stores between steps: formulas, which the row of a
strategy names and which add up; `analysis/ledger.py` compares the measurement with it, and says why they differ.
`analysis/guess.py` has the table of the figures that a learner can predict, each of them one of the summary, and the
outcome in numbers and sentences.

`analysis/diagnose/` reads the state for causes, one function per rule, the most severe finding first:

- `analysis/diagnose/errors.py`, `analysis/diagnose/known_errors.py`: runs that fail, and collectives that do not
  match; the table of errors that are recognised by their message
- `analysis/diagnose/hang.py`: runs that make no progress; which rank waits in which collective of which process
  group, and what NCCL's RAS service says about it
- `analysis/diagnose/looks.py`: runs that end without an error and train something else than their author thinks
- `analysis/diagnose/training.py`: runs that train something else, and training that the probe cannot observe
- `analysis/diagnose/speed.py`: runs that are slow or large, and mixtures of experts whose load is uneven

`analysis/diagnose/finding.py` words each fix for the script that ran: as an option if a strategy ran, as a line of
PyTorch otherwise.

`analysis/foreign/` reads files of jobs that ran without the lab (traces of torch's profiler, dumps of its flight
recorder and debug server, memory snapshots, reports of NCCL's RAS, logs) and says what happened there, also as
events of a run. `analysis/changes.py` says what changed between two runs, from their profiled steps, dumps or logs.

`analysis/comparison.py` has the rows of a comparison, live or recorded, for every front end. `plan` in
`runs/comparing.py` settles all Specs before the first run starts (the same global batch, seed and order of samples;
`single` first), and `Comparing` runs them one after another. `badge` in `analysis/comparison.py` assembles the shards
that the ranks recorded into whole tensors, and says whether two runs are equivalent; `departures` in
`training/strategies/rules.py` collects the reasons why a run is expected to differ.
"""
