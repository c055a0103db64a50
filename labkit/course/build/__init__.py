"""Exercises in which the learner implements a parallel strategy, graded on real ranks.

============== =====================================================================================================
`criteria`     takes the answer's source, runs it on CPU ranks as an ordinary run, and judges what each rank recorded;
               each criterion names itself, the rank, the step, what was expected and what it got
`record`       what a rank records: losses, calls in order with their bytes, memory
`ranks/`       what runs inside the ranks, the only part that loads torch: the recorder and one trial per exercise
`solutions/`   the reference solutions, which the tests run and the teacher's handouts show
============== =====================================================================================================
"""
