"""Warm start: a server that has already imported torch forks a run's processes, so that a run starts in one second
instead of ten.

========= =======================================================================================================
`facts`   what a process inherits or reads while importing; if server and run differ in it, the run starts cold
`client`  the launcher's side: checks whether a run can start warm, starts the run, starts the server
`server`  the warm server: one per user and interpreter, with a socket in a folder of mode 0700
`fork`    a forked process with the interface of `subprocess.Popen`
`fresh`   resets a forked process to the state of a newly started one
`ranks`   torchrun's own agent, with forked ranks
`wire`    messages and file descriptors over a Unix socket
========= =======================================================================================================

Only `facts`, `client` and `wire` are imported outside of the server. They do not import torch.
"""
