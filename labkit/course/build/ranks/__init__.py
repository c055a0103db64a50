"""What runs inside the ranks of a graded answer. Only this package of the course loads torch.

=============== ===================================================================================================
`entry`         the last line of a graded script: runs the trial, and records how it ended
`recorder`      records communication, matrix products and live memory while the answer runs
`finished_api`  notices a call of a finished implementation, however the answer got hold of it
`watchdog`      ends a rank that makes no progress, and says in which call it waits
`ddp`, `zero`,  one module per exercise: the model, the data, the reference on a single device, and the loop that calls
…               the answer
=============== ===================================================================================================
"""
