"""What runs every graded answer inside its ranks, and examines it in a process of its own. With `trials/`,
only this loads torch.

=============== ===================================================================================================
`entry`         the first line of a graded script: executes the answer, runs the trial, and signs what it recorded;
                ends a rank that makes no progress, and says in which call it waits
`recorder`      records communication, operations and live memory while the answer runs
`rules`         notices a call of a finished implementation, however the answer got hold of it, and ways around the
                recorder: files, processes, frames, replaced functions
`examiner`      the program that draws the inputs of each rank and compares what the ranks end with
=============== ===================================================================================================
"""
