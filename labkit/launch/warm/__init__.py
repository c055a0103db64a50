"""Warm start: a server that has torch imported forks a run's processes, so that a run starts in a second and not in ten.

========= =======================================================================================================
`facts`   what a process inherits or reads while it imports: where server and run differ in it, the run starts cold
`client`  the launcher's side: whether a run can start warm, the start itself, and the server's own start
`server`  the process that waits: one for each user and interpreter, in a folder of mode 0700
`fork`    a forked process in the place of `subprocess.Popen`
`fresh`   what makes a forked process like one that was started anew
`ranks`   torchrun's own agent, whose ranks are forked
`wire`    messages and file descriptors over a Unix socket
========= =======================================================================================================

Only `facts`, `client` and `wire` are imported outside of the server. They load no torch.
"""
