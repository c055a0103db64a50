"""Runs answers in which the learner implements a parallel strategy, or makes a script fast, on real ranks, and judges
them. The modules of `course/exercises/` say what is asked and required.

============== =====================================================================================================
`criteria`     takes the answer's source, runs it on CPU ranks as an ordinary run, and judges what each rank recorded;
               each criterion names itself, the rank, the step, what was expected and what it got
`record`       what a rank records: losses, calls in order with their bytes, operations, memory; what is expected of it
`sandbox`      runs the ranks of a submitted answer with limits, instead of as an ordinary run
`ranks/`       what runs the answer inside the ranks and watches it, and the program of the examiner
`trials/`      the drawn inputs, what a single device and common mistakes make of them, and what calls the answer
`solutions/`   the reference solutions, which tests run and the teacher's handouts show; no rank loads them
`starters/`    what a lab writes next to the notebook, to start from or to run (`labkit.starter`)
============== =====================================================================================================

They are apart because different processes load them: the notebook loads the first three, without torch; the examiner
and the ranks load `ranks/` and `trials/`.

The judge trusts no value that an answer could make up. The examiner, a process of its own, draws inputs and parameters
for each check, gives each rank only what it may know, and compares losses, gradients, parameters and outputs with those
of a single device. What an answer sends, computes and stores has a lower and an upper bound.
"""
