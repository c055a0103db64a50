"""The commands that start a job by hand: one per node."""

from __future__ import annotations

import shlex

from labkit.engines.portable import Portable

PORT = 29_500  # torchrun's own default
_HOST = "HOST"  # stands for the address of node 0


def commands(job: Portable, endpoint: str = f"{_HOST}:{PORT}") -> list[str]:
    """The command for each node, in order; `endpoint` is the address and port of node 0 as the others reach it."""
    if job.nodes == 1:
        return [shlex.join(["torchrun", "--standalone", *_ranks(job), *job.target])]
    host, _, port = endpoint.rpartition(":")
    return [
        shlex.join(
            [
                *("torchrun", f"--nnodes={job.nodes}", f"--node-rank={node}"),
                *(f"--master-addr={host}", f"--master-port={port}"),
                *_ranks(job),
                *job.target,
            ]
        )
        for node in range(job.nodes)
    ]


def _ranks(job: Portable) -> list[str]:
    restarts = [f"--max-restarts={job.max_restarts}"] if job.max_restarts else []
    return [f"--nproc-per-node={job.per_node}", *restarts]
