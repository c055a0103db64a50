"""Predicts the memory and traffic of a run before it starts, without a GPU: `predict` traces the generated script.

`tracing/` runs in a separate process, and alone imports torch. This package never imports launch or front ends.

`prediction/predict.py` makes a plan (`plan.json`, `Plan` in `record/documents.py`) from a Spec, and caches it.
`prediction/tracer.py` finds ranks that do the same work, of which one is traced (unequal shards and the stages of a
pipeline are separate classes), keeps one process that has imported torch, and asks it; in the panel this process is
forked from the warm server, which saves it the import of torch. A request can be cancelled without ending the
process. A trace that fails, a process that is killed and one that takes too long are each one sentence, and the plan
then has what the formulas of `analysis/theory/` say.

- `prediction/tracing/rank.py`: builds the script's model and optimizer from its own functions, runs two steps (FSDP)
  or three under torch's fake tensors, and reports the last one with its phases; for the time of a step it measures what
  the rank computes
- `prediction/tracing/tape.py`: a dispatch mode that records every allocation, release and collective; its record goes
  through the same `curve` as a profiled step, so predicted and measured figures have one definition. It also has what
  the rank computes and sends, in order (FLOPs and bytes of each kernel, and where the result of each collective is
  needed), what it recomputes, and what the model needs on one device
- `prediction/tracing/world.py`: one rank of torch's fake process group, the few functions of torch that read data or
  wait for peers, and what stands in for `DistributedDataParallel`, whose C++ reducer cannot read fake tensors
- `prediction/tracing/kernels.py`: the temporary memory inside kernels, such as a convolution's, measured by executing
  each distinct operation once, and a replay of the caching allocator of CUDA
- `prediction/tracing/torch_private.py`: the table of torch's private names that a trace needs, like that of the probe
- `prediction/tracing/own_script.py`: executes a script of the user's own instead: steps, phases and owners are found
  by the hooks of the probe, with the tape as their clock; what such a script hears about GPUs, data loaders and other
  ranks is there, too, and what refuses all that would change anything: an audit hook, and a limit of 0 bytes per file

What depends on the machine is added to a plan whenever it is read: the peak of its devices, and whether the ranks fit
into their memory (`prediction/predict.py`).

The time of a step (`prediction/timing.py`) needs no fake tensors: `prediction/tracing/rank.py` runs the script with
real tensors and data in a process group in which every collective is over at once, and cuts what the rank computes at
the moments when it starts a collective or waits for one. `prediction/timing.py` executes these programs of all ranks
against a model of communication, and returns the timeline of a step in the form of a profiled one. For a named machine,
and for a script of the user's own, it gives the seconds of the traced kernels, and `prediction/links.py` those of the
collectives; neither runs anything.

A run that is started with a Spec whose plan is cached stores it. `analysis/prediction.py` compares it with the
measurement, and names the owners of memory in which a rank differs. What is read from a tensor without data is
assumed: no flag (such as an overflow) is set, and numbers are 1. The integers of a user's script are computed,
because it reads positions in its data from them. `Module.compile` does nothing in a trace. For GPUs, tensors are
traced on the CPU, because torch without CUDA cannot compute gradients of fake tensors on a GPU: the optimizer updates
all parameters at once (foreach), `DataParallel` is its first device, and numbers of the optimizer are on the host.
`prediction/tracing/kernels.py` replays torch's caching allocator from the first step on, with the workspaces that
cuBLAS keeps for the script's thread and for that of backward, and `prediction/predict.py` makes the result the peak,
for the GPUs of the machine. What a GPU needs besides are published figures with their sources: estimates with a
range, next to the peak and never in it. The formulas of `analysis/theory/formulas.py` stand there, too, with the reason
why a traced peak differs.

`CommunicationModel` in `prediction/links.py` is the one interface for how long a collective takes. `Measured`
interpolates what was measured on this machine; `Modelled` computes it for a row of `prediction/devices.py`, whose
figures each name their public source. For one node of A100s this agrees with the tuning model in torch's compiler to
within 1 % (all-reduce, all-gather, reduce-scatter; a test compares them). `labkit doctor --calibrate` writes the table
of this machine, and with it what kernels reach on CPU ranks: `runs/calibration.py` starts the ranks, each of which runs
`probe/link_times.py`. The fastest tenth of the calls after computing gives the time of a call; what the others take
longer are its delays, which the simulation adds to each collective and message, drawn at random.

`prediction/scale/` has no Spec and no trace: it estimates a transformer under any layout by closed formulas, for advice
(`labkit advise`) and scaling. `prediction/scale/advice.py` turns arguments into a `Training`, the input of everything
else, and into a `Layout`, and tries all layouts and all numbers of devices; `prediction/scale/model.py` finds the model
and has its numbers. A `Layout` (`prediction/scale/layouts.py`) is one choice of the table of shardings, of degrees, and
of a framework, whose row says what it does differently; `prediction/scale/step.py` makes it an `Estimate`, with each
rule and its source in their docstrings. What an accelerator and a network reach is in `prediction/devices.py`, or in a
file that describes another machine. Constants that were fitted are in these tables only, never next to a case. The
formulas of the states are those of `analysis/theory/`, and a test compares them with the trace. `figures/advice.py`
displays the results.

`prediction/scale/published.csv.gz` has published runs on real GPUs, verbatim. `prediction/scale/atlas.py` reads them as
a `Training`, a `Layout` and what was measured, selects some of them, ranks the layouts of a case, and finds those that
are near a layout (`evidence`); `check` compares estimates with them. `figures/atlas.py` displays them. Advice, the
exercises of `course/exercises/layouts.py` and the claims of `course/claims/computed.py` use it.
"""
