"""Exercises in which the learner implements a parallel strategy, or makes a script fast, graded on real ranks.

What belongs to the exercises of one lab is in one folder, called like their topic (lab 22, `precision.step`:
`precision/`). Its files are apart because different processes load them:

============== =====================================================================================================
`exercises`    what is asked, what is required, and the verdict in words; the notebook loads it, without torch
`trial`        the drawn inputs, the results of a single device and of common mistakes, and the loop that calls the
               answer; the examiner and the ranks load it (lab 14 has three: `tensor`, `pipeline` and `ring`)
`solution`     the reference solutions, which tests run and the teacher's handouts show; no rank loads them
other scripts  what a lab writes next to the notebook, to start from or to run (`labkit.starter`)
============== =====================================================================================================

All of them share:

============== =====================================================================================================
`criteria`     takes the answer's source, runs it on CPU ranks as an ordinary run, and judges what each rank recorded;
               each criterion names itself, the rank, the step, what was expected and what it got
`record`       what a rank records: losses, calls in order with their bytes, operations, memory; what is expected of it
`ranks/`       what runs the answer inside the ranks and watches it, and the program of the examiner
`sandbox`      runs the ranks of a submitted answer with limits, instead of as an ordinary run
`grade`        judges a folder of submissions and writes a CSV
============== =====================================================================================================

The judge trusts no value that an answer could make up. The examiner, a process of its own, draws inputs and parameters
for each check, gives each rank only what it may know, and compares losses, gradients, parameters and outputs with those
of a single device. What an answer sends, computes and stores has a lower and an upper bound. A loader of lab 09 is
observed in plain processes instead.
"""
