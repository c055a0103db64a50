"""Exercises in which the learner implements a parallel strategy, graded on real ranks.

============== ====================================================================================================
`source`       the answer as source code: the function or class, and everything in the notebook that it uses
`launching`    starts the answer on CPU ranks as an ordinary run, and reads what each rank recorded
`record`       what a rank records: losses, calls in order with their bytes, memory
`criteria`     what is required of the records; each criterion names itself, the rank, the step, expected and got
`ranks/`       what runs inside the ranks, the only part that loads torch: the recorder and one trial per exercise
`solutions/`   the reference solutions, which the tests run and the teacher's handouts show
============== ====================================================================================================
"""
