"""Exercises in which the learner implements a parallel strategy, or makes a script fast, graded on real ranks.

============== =====================================================================================================
`criteria`     takes the answer's source, runs it on CPU ranks as an ordinary run, and judges what each rank recorded;
               each criterion names itself, the rank, the step, what was expected and what it got
`record`       what a rank records: losses, calls in order with their bytes, operations, memory
`ranks/`       what runs inside the ranks and the examiner, the only part that loads torch
`loader`       judges a loader of shards by the batches that plain processes got; `shards` draws its task
`sandbox`      runs the ranks of a submitted answer with limits, instead of as an ordinary run
`grade`        judges a folder of submissions and writes a CSV
`given/`       scripts that a lab writes next to the notebook, to start from or to run
`solutions/`   the reference solutions, which the tests run and the teacher's handouts show
============== =====================================================================================================

The judge trusts no value that an answer could make up. The examiner, a process of its own, draws inputs and parameters
for each check, gives each rank only what it may know, and compares losses, gradients, parameters and outputs with those
of a single device. What an answer sends, computes and stores has a lower and an upper bound.
"""
