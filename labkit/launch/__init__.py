"""From a Spec to processes and back: the run folder, the supervisor, the engine of this machine."""
