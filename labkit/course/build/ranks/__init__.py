"""What runs inside the ranks of a graded answer. Only this package of the course loads torch.

=============== ===================================================================================================
`entry`         the last line of a graded script: runs the trial, and records how it ended; notices a call of a finished
                implementation, however the answer got hold of it; ends a rank that makes no progress, and says in
                which call it waits
`recorder`      records communication, matrix products and live memory while the answer runs
`data_parallel` and the others have the trials: the model, the data, the reference on a single device, and the loop
                that calls the answer
=============== ===================================================================================================
"""
