"""What a lab writes next to the notebook, to start from or to run (`labkit.starter`): scripts that import nothing
of the lab, and a snapshot of memory."""
