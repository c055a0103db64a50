"""Terms of processes, and of the communication between them."""

from labkit.course.terms.term import Term

TERMS = (
    # ---- processes
    Term(
        "rank",
        "The number of a process within a process group, from 0 to its size − 1; often also the process itself. A "
        "job usually has one process per device.",
        ("local rank", "world size", "process group"),
    ),
    Term(
        "local rank",
        "The number of a process among the processes of its node, from 0 up; it usually selects the GPU. torchrun "
        "sets it as LOCAL_RANK.",
        ("rank", "node", "torchrun"),
    ),
    Term(
        "world size",
        "The number of processes of a job over all nodes: nodes × processes per node. torchrun sets it as WORLD_SIZE.",
        ("rank", "node", "process group"),
    ),
    Term(
        "node",
        "One machine of a job, with its own operating system, CPUs and devices. Devices within a node are connected "
        "by NVLink or PCIe, nodes by a network such as InfiniBand or Ethernet.",
        ("local rank", "interconnect"),
    ),
    Term(
        "process group",
        "A set of ranks that communicate with each other through one backend. A collective involves exactly the "
        "ranks of its group.",
        ("rank", "collective", "backend", "device mesh"),
    ),
    Term(
        "backend",
        "The library that carries out the communication of a process group: NCCL for tensors on GPUs, gloo for "
        "tensors on CPUs.",
        ("NCCL", "gloo", "process group"),
    ),
    Term(
        "NCCL",
        "NVIDIA's library of collectives and send/receive between GPUs, over NVLink, PCIe and the network. Its "
        "operations are kernels on a CUDA stream, and a call returns before the data have arrived.",
        ("backend", "gloo", "NVLink"),
        also=("NVIDIA Collective Communications Library",),
    ),
    Term(
        "gloo",
        "PyTorch's backend for tensors on CPUs: collectives and send/receive over TCP, run by threads of the process.",
        ("backend", "NCCL"),
    ),
    Term(
        "torchrun",
        "PyTorch's launcher. It starts the processes of a node, sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT in their environment, and restarts them after a failure if --max-restarts allows it.",
        ("rank", "rendezvous", "restart"),
    ),
    Term(
        "rendezvous",
        "The phase of a launch in which the launchers of all nodes find each other through a shared store, agree on "
        "the participants and assign the ranks.",
        ("torchrun", "elastic training"),
    ),
    Term(
        "elastic training",
        "Training in which the number of nodes may change during a job. After a change the nodes repeat the "
        "rendezvous, all processes restart with a new world size, and the script resumes from its last checkpoint.",
        ("rendezvous", "restart", "checkpoint"),
        ordinary=("elastic",),
    ),
    Term(
        "restart",
        "The reaction of torchrun to a rank that failed: it terminates the other ranks and starts all of them "
        "again, at most --max-restarts times. The script must resume from a checkpoint, or training begins again at "
        "step 0.",
        ("torchrun", "checkpoint", "elastic training"),
    ),
    # ---- communication
    Term(
        "collective",
        "A communication operation of all ranks of a process group, such as all-reduce. Every rank of the group "
        "must call it, in the same order as the other collectives of the group; if one does not, the others block.",
        ("process group", "all-reduce", "collective mismatch"),
        also=("collective operation",),
    ),
    Term(
        "all-reduce",
        "Combines one tensor per rank element by element, usually to the sum or mean, and leaves the result on "
        "every rank. With the ring algorithm each of n ranks sends 2 (n − 1) / n × S bytes for a tensor of S bytes.",
        ("reduce-scatter", "all-gather", "ring algorithm", "gradient synchronisation"),
    ),
    Term(
        "all-gather",
        "Concatenates the chunks of all ranks and leaves the whole tensor on every rank. With the ring algorithm "
        "each of n ranks sends (n − 1) / n × S bytes for a result of S bytes.",
        ("reduce-scatter", "all-reduce", "FSDP"),
    ),
    Term(
        "reduce-scatter",
        "Combines one tensor per rank element by element and leaves a different chunk of the result on each rank. "
        "With the ring algorithm each of n ranks sends (n − 1) / n × S bytes for an input of S bytes. An all-gather "
        "after it completes an all-reduce.",
        ("all-gather", "all-reduce", "FSDP"),
    ),
    Term(
        "broadcast",
        "Copies a tensor from one rank to all other ranks of the process group. DDP broadcasts the parameters of "
        "rank 0 once, at the start.",
        ("collective", "tree algorithm"),
    ),
    Term(
        "all-to-all",
        "Each rank sends a different chunk of its tensor to every other rank and receives one chunk from each. Each "
        "of n ranks sends (n − 1) / n × S bytes of an input of S bytes.",
        ("collective", "expert parallel", "context parallel"),
    ),
    Term(
        "send/receive",
        "Point-to-point communication: one rank sends a tensor, and one other rank receives it. Pipeline stages "
        "pass activations and their gradients in this way.",
        ("pipeline stage", "collective"),
        also=("point-to-point communication",),
        ordinary=("send", "receive", "P2P"),
    ),
    Term(
        "ring algorithm",
        "An algorithm for collectives in which each rank sends to its successor and receives from its predecessor "
        "only. An all-reduce of S bytes on n ranks takes 2 (n − 1) steps of S / n bytes: it uses the full bandwidth "
        "of the links, but its latency grows in proportion to n.",
        ("tree algorithm", "all-reduce"),
        also=("ring all-reduce",),
        ordinary=("ring",),
    ),
    Term(
        "tree algorithm",
        "An algorithm for collectives that combines data along a tree of ranks and passes results back down. Its "
        "latency grows with the logarithm of the number of ranks, which makes it faster than a ring for small "
        "tensors and many ranks.",
        ("ring algorithm", "broadcast"),
        ordinary=("tree",),
    ),
    Term(
        "interconnect",
        "The links between devices: NVLink, NVSwitch or PCIe within a node, InfiniBand or Ethernet between nodes. "
        "It is characterised by latency (seconds per message) and bandwidth (bytes per second).",
        ("NVLink", "PCIe", "InfiniBand"),
        ordinary=("link",),
    ),
    Term(
        "NVLink",
        "NVIDIA's direct link between GPUs. Its bandwidth per GPU, both directions added, is 600 GB/s on the A100, "
        "900 GB/s on the H100 and 1.8 TB/s on the B200; NVSwitch chips connect all GPUs of a node by NVLink.",
        ("PCIe", "interconnect", "NCCL"),
        ordinary=("NVSwitch",),
    ),
    Term(
        "PCIe",
        "PCI Express, the bus between the CPU and its GPUs and network adapters. With 16 lanes it carries about 16 "
        "GB/s in each direction in generation 3, 32 GB/s in generation 4 and 64 GB/s in generation 5.",
        ("NVLink", "interconnect", "pinned memory"),
    ),
    Term(
        "InfiniBand",
        "A network for clusters whose adapters read and write the memory of other nodes directly (RDMA). An NDR "
        "port carries 400 Gbit/s, which is 50 GB/s, in each direction.",
        ("interconnect", "node"),
    ),
    Term(
        "bus bandwidth",
        "The bandwidth of the links that the duration of a collective implies, in bytes per second: S / seconds × 2 "
        "(n − 1) / n for an all-reduce of S bytes on n ranks. It can be compared with the rating of the link for "
        "any number of ranks.",
        ("all-reduce", "interconnect"),
        also=("busbw",),
    ),
    Term(
        "traffic",
        "The bytes that a rank sends, usually given per step.",
        ("collective", "overlapped communication"),
    ),
    Term(
        "overlapped communication",
        "Communication that runs while the same device computes and therefore does not lengthen the step. DDP "
        "overlaps the all-reduce of a bucket with the backward pass of earlier layers.",
        ("exposed communication", "bucket", "prefetch"),
        also=("hidden communication",),
    ),
    Term(
        "exposed communication",
        "Communication during which the device computes nothing: it lengthens the step by its duration. Exposed "
        "time = communication time − overlapped time.",
        ("overlapped communication", "straggler"),
    ),
    Term(
        "communication-bound",
        "Said of a step whose communication takes longer than its computation: not even perfect overlap could hide "
        "it. More devices with a constant global batch end here sooner or later.",
        ("exposed communication", "overlapped communication", "strong scaling"),
    ),
    Term(
        "straggler",
        "A rank that reaches a collective later than the others. A synchronous step takes as long as its slowest "
        "rank, because the collective completes only when every rank has called it.",
        ("collective", "exposed communication"),
    ),
    Term(
        "deadlock",
        "A state in which ranks block forever because each waits for an operation that another rank will never call.",
        ("collective mismatch", "collective"),
        ordinary=("hang",),
    ),
    Term(
        "collective mismatch",
        "A programming error: ranks of one process group call different collectives, or the same collective with "
        "different shapes, data types or order. It results in a deadlock, an error or wrong values.",
        ("deadlock", "collective"),
    ),
)
