"""Warm start: a server that has already imported torch forks a run's processes, so that a run starts in one second
instead of ten.

============ ======================================================================================================
`client`     the launcher's side: messages to the server, what a run and the server must have in common, the start; and
             whether a script could depend on the seed of `hash(str)`, the one thing that warm ranks share
`server`     the warm server: one per user and interpreter, with a socket in a folder of mode 0700
`fork`       a forked process, with the state of a newly started one and the interface of `subprocess.Popen`; the
             supervisor, torchrun's own agent and its ranks as such processes
============ ======================================================================================================

Only the first is imported outside of the server. It does not import torch.
"""
