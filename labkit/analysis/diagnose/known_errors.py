"""The table of errors that are recognised by their message, each with its cause and fix."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownError:
    """An error that is recognised by its message, which matches `pattern`. If it `follows`, other ranks report it
    because one has failed: then it counts only for the rank that failed first."""

    name: str
    pattern: str
    title: str
    cause: str
    fix: str
    follows: bool = False


COLLECTIVE_TIMEOUT = r"Watchdog caught collective operation timeout"

KNOWN_ERRORS = (
    KnownError(
        "nodes_differ",
        r"^NodesDiffer: ",
        "the nodes of the run have different software",
        "the ranks of a run must agree on every collective, which different versions and scripts do not guarantee",
        "start the same command with the same script and environment on every node",
    ),
    KnownError(
        "unused_parameters",
        r"Expected to have finished reduction in the prior iteration"
        r"|has parameters that were not used in producing the loss",
        "DDP received no gradient for some parameters",
        "DDP expects a gradient for every parameter; some parameters took no part in the loss, so their bucket never "
        "completed",
        "use every parameter in forward, or set find_unused_parameters=True in DDP, which traverses the autograd "
        "graph in every step",
    ),
    KnownError(
        "shuffle_beside_sampler",
        r"sampler option is mutually exclusive with shuffle",
        "DataLoader got both a sampler and shuffle=True",
        "the sampler determines the order of the samples, so DataLoader rejects shuffle=True",
        "remove shuffle from DataLoader and shuffle in the sampler: DistributedSampler(dataset, shuffle=True)",
    ),
    KnownError(
        "marked_twice",
        r"Expected to mark a variable ready only once",
        "DDP received the gradient of a parameter twice in one backward",
        "a layer is used several times with reentrant checkpointing, or the model is called around DDP's forward, so a "
        "bucket that was already sent would change",
        "use checkpoint(…, use_reentrant=False), or DistributedDataParallel(model, static_graph=True)",
    ),
    KnownError(
        "graph_not_static",
        r"Your training graph has changed in this iteration",
        "a DDP model with static_graph=True used other parameters than in its first step",
        "with static_graph=True, DDP counts in the first step which parameters get a gradient, and how often; later "
        "steps must do the same",
        "remove static_graph=True, and set find_unused_parameters=True if a branch leaves parameters out",
    ),
    KnownError(
        "attribute_of_wrapper",
        r"'(?:DistributedDataParallel|DataParallel|FullyShardedDataParallel)' object has no attribute",
        "the script asks a wrapper for what the model inside has",
        "the wrapper is a module of its own; it forwards calls of the model, but not its methods and attributes",
        "read attributes from model.module; but call the wrapper, model(x), where gradients are needed",
    ),
    KnownError(
        "nothing_to_train",
        r"DistributedDataParallel is not needed when a module doesn't have any parameter",
        "DDP got a model without a parameter that requires a gradient",
        "DDP only synchronizes gradients; all parameters were frozen before it was wrapped, or there are none",
        "unfreeze parameters before wrapping, or use the model without DDP",
    ),
    KnownError(
        "parameters_differ",
        r"appears not to match (?:sizes|strides) of the same param in process 0|has \d+ params, while rank",
        "the models of the ranks differ in shape",
        "DDP compares the parameters of all ranks when it is created; the ranks built different models",
        "build the model from the same configuration on every rank: no size may depend on a rank's data or vocabulary",
    ),
    KnownError(
        "changed_in_place",
        r"modified by an inplace operation",
        "a tensor that backward needs was changed after forward",
        "an optimizer step, an operation such as x += y, or DDP's broadcast of buffers in a second forward changed it",
        "call backward before the next step or forward; replace x += y by x = x + y; with two forwards of DDP per "
        "backward, set broadcast_buffers=False",
    ),
    KnownError(
        "recomputed_differently",
        r"A different number of tensors was saved during the original forward and recomputation"
        r"|Recomputed values for the following tensors have different metadata",
        "a checkpointed part computed something else when it was recomputed",
        "activation checkpointing runs the part again in backward; it depended on something that had changed, such as "
        "autocast, a counter, a cache, random numbers, or whether FSDP had gathered the parameters",
        "make the part depend on its inputs and parameters only; keep preserve_rng_state=True; apply checkpointing "
        "before fully_shard, and turn off caches (use_cache=False)",
    ),
    KnownError(
        "graph_freed",
        r"Trying to backward through the graph a second time",
        "backward was called twice for the same forward",
        "backward frees the graph; a loss or hidden state of an earlier step is still part of the new loss",
        "call backward once for the sum of the losses, and detach() what is carried from one step to the next",
    ),
    KnownError(
        "no_gradient",
        r"does not require grad and does not have a grad_fn",
        "the loss does not depend on any parameter that requires a gradient",
        "all parameters are frozen, or the forward ran under no_grad, or the loss was computed from detached tensors",
        "check requires_grad of the parameters, and remove no_grad(), detach() and .item() between forward and loss",
    ),
    KnownError(
        "no_group",
        r"Default process group has not been initialized",
        "a collective was called without a process group",
        "init_process_group was not called in this process, or destroy_process_group was called before",
        "call torch.distributed.init_process_group() at the start of every rank, and destroy it last",
    ),
    KnownError(
        "not_started_by_torchrun",
        r"environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set",
        "the script was not started by torchrun",
        "init_process_group reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun sets for each rank",
        "start it with torchrun --nproc-per-node=N, or export these variables from those of your launcher",
    ),
    KnownError(
        "group_twice",
        r"trying to initialize the default process group twice",
        "init_process_group was called twice",
        "a library such as accelerate, DeepSpeed or Lightning has already created the default group",
        "guard the call: if not torch.distributed.is_initialized()",
    ),
    KnownError(
        "group_too_large",
        r"new group's (?:world size|rank) should be|Mesh should not be bigger than default world size",
        "a group or device mesh has more ranks than were started",
        "the sizes of the axes of the mesh multiply to more than the number of ranks",
        "start as many ranks as the product of the parallel degrees, or lower a degree",
    ),
    KnownError(
        "invalid_sampler_rank",
        r"Invalid rank \d+, rank should be in the interval",
        "DistributedSampler got a rank outside of its number of replicas",
        "num_replicas and rank belong to different groups, such as the world and one axis of a mesh",
        "pass both from the same group: num_replicas=mesh['dp'].size(), rank=mesh['dp'].get_local_rank()",
    ),
    KnownError(
        "cpu_tensor",
        r"No backend type associated with device type cpu|Tensors must be CUDA and dense",
        "a tensor in CPU memory was passed to NCCL",
        "NCCL communicates between GPUs only; the group has no backend for CPU tensors",
        "move the tensor to the rank's GPU, or use init_process_group('cpu:gloo,cuda:nccl')",
    ),
    KnownError(
        "no_interface",
        r"Unable to find address for: |no socket interface found|Bootstrap : no socket",
        "GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no network interface of this machine",
        "gloo and NCCL bind to the interface of that name, and names differ between machines",
        "list the names with `ip -brief address`, and set the variable to one of them, or unset it",
    ),
    KnownError(
        "peers_missing",
        r"Timed out after \d+ seconds waiting for clients|RendezvousTimeoutError",
        "not all ranks arrived at the rendezvous",
        "fewer processes were started than world_size or --nnodes × --nproc-per-node says, or one failed before it",
        "start the same torchrun command on every node, and look for an earlier error in the logs of the others",
        follows=True,
    ),
    KnownError(
        "name_not_resolved",
        r"host not found|Name or service not known|[Nn]ame resolution",
        "the name of a host cannot be resolved",
        "MASTER_ADDR or --rdzv-endpoint is a name that this node does not know; on Kubernetes, a name may be unknown "
        "until its pod runs",
        "check the name on this node (`getent hosts NAME`), or use the address; on Kubernetes, let the headless "
        "service publish addresses that are not ready, or start again",
    ),
    KnownError(
        "no_connection",
        r"client socket has (?:timed out|failed to connect)|connection to the C10d store has failed",
        "the rank cannot connect to the address of the rendezvous",
        "nothing listens at MASTER_ADDR:MASTER_PORT: rank 0 has not started or has ended, the address is wrong, or a "
        "firewall is between the nodes",
        "check that node 0 is running and that --rdzv-endpoint names its address as the other nodes see it",
        follows=True,
    ),
    KnownError(
        "barrier_not_reached",
        r"failed to pass monitoredBarrier",
        "a rank did not reach a monitored barrier",
        "the rank that the message names was slower than the timeout, took another branch, or had ended",
        "look at what the named rank was doing; raise the timeout only if it was still working",
        follows=True,
    ),
    KnownError(
        "not_contiguous",
        r"(?:input|output)? ?tensors? (?:has to|must) be contiguous",
        "a collective got a tensor that is not contiguous",
        "transposed or sliced tensors are views with strides, and collectives send one block of memory",
        "call .contiguous() before the collective, and copy the result back if the view must change",
    ),
    KnownError(
        "output_size",
        r"output tensor size must be equal to|invalid tensor size at index|outputShape\[0\] \* worldSize",
        "the sizes of input and output of a collective do not fit",
        "all-gather returns world_size times its input, reduce-scatter 1/world_size of it",
        "allocate the output for all ranks, and pad an input that is not divisible by the number of ranks",
    ),
    KnownError(
        "split_sizes",
        r"Split sizes doesn't match total dim 0 size",
        "the split sizes of an all-to-all do not add up to its tensors",
        "the lengths that ranks send and receive differ, as with a router that sends each expert another number of "
        "tokens",
        "exchange the counts first (all_to_all_single of the split sizes), and allocate the output for their sum",
    ),
    KnownError(
        "whole_into_shards",
        r"While copying the parameter named .*got mixed torch\.Tensor and DTensor",
        "a checkpoint of whole tensors was loaded into a sharded model",
        "after fully_shard or parallelize_module the parameters are DTensors, of which each rank has a part; "
        "load_state_dict copies only tensors of the same kind",
        "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True)) of "
        "torch.distributed.checkpoint.state_dict; or load before the model is sharded",
    ),
    KnownError(
        "mixed_tensors",
        r"got mixed torch\.Tensor and DTensor",
        "one operation got a DTensor and a plain tensor",
        "a module whose parameters are DTensors was called around its wrapper, or an optimizer or clip_grad_norm_ "
        "handles split and whole parameters together (foreach or fused, the default on GPUs)",
        "call the wrapped module; give split and whole parameters separate parameter groups; or make the rest DTensors "
        "with distribute_tensor(…, [Replicate()])",
    ),
    KnownError(
        "mixed_meshes",
        r"on inputs with different meshes",
        "one operation got DTensors of different meshes",
        "DTensors are combined only on the same mesh; these were sharded by different ones, such as tp and dp × tp",
        "handle the parameters of each mesh separately, or distribute both tensors on one mesh",
    ),
    KnownError(
        "no_sharding_rule",
        r"does not have a sharding strategy registered|Sharding propagation failed",
        "DTensor has no rule for this operation",
        "the operation is not supported for this placement of its inputs",
        "compute it on local tensors (to_local(), then DTensor.from_local), or on x.full_tensor()",
    ),
    KnownError(
        "shared_by_units",
        r"is shared with a parameter already managed by another FSDP group",
        "two FSDP units share a parameter",
        "each unit gathers and shards its own parameters, so a tied weight, such as that of embedding and head, must "
        "belong to one unit",
        "fully_shard([model.embedding, model.head]) puts both modules into one unit; or untie the weights",
    ),
    KnownError(
        "no_data_on_meta",
        r"Cannot copy out of meta tensor; no data",
        "a tensor on the meta device was copied",
        "tensors on meta have a shape and no values; .to(device) has nothing to copy",
        "call model.to_empty(device=…), then initialize the weights or load a checkpoint (load_state_dict with "
        "assign=True)",
    ),
    KnownError(
        "still_on_meta",
        r"parameters should be materialized from meta device",
        "parameters of an FSDP model are still on the meta device",
        "the model was built on meta, which has no memory, and was not initialized after fully_shard",
        "call model.to_empty(device=…) after fully_shard, then initialize the weights or load a checkpoint",
    ),
    KnownError(
        "flat_parameter",
        r"'weight' must be 2-D|setStorage: sizes .* out of bounds for storage of size 0"
        r"|data is not allocated yet",
        "a sharded parameter was used outside of the forward of its FSDP unit",
        "FSDP gathers parameters only in the forward and backward of the wrapped module; otherwise they are empty or "
        "flat",
        "call the FSDP module itself, use summon_full_params or unshard(), or put modules that share a weight into one "
        "unit",
    ),
    KnownError(
        "uniform_units",
        r"Must flatten tensors with uniform|FSDP expects uniform original parameter dtype",
        "an FSDP unit has parameters that differ in dtype or requires_grad",
        "the parameters of a unit are gathered as one tensor, which has one dtype (FSDP1: also one requires_grad)",
        "cast the model to one dtype before wrapping, or make modules of another dtype units of their own; with FSDP1 "
        "use_orig_params=True for frozen parameters",
    ),
    KnownError(
        "fsdp_on_cpu",
        r"FSDP needs a non-CPU accelerator device",
        "FSDP1 found no GPU",
        "without device_id, FSDP1 takes the current accelerator, and there is none",
        "pass device_id=torch.device('cpu'), or use fully_shard with a CPU mesh",
    ),
    KnownError(
        "stage_without_gradient",
        r"Output gradient: \('None'",
        "a stage of a pipeline received no gradient of its output",
        "output_args tells which outputs of a stage require a gradient, and the next stage sends none for the others",
        "pass output_args that require one: torch.empty(…).requires_grad_(), or leave input_args and output_args out",
    ),
    KnownError(
        "stage_shapes",
        r"PipeliningShapeError|Failed to run stage backward|Expecting \d+ arg_mbs|is smaller than num_chunks",
        "a pipeline got a batch of another size than its first one",
        "the shapes between stages are fixed in the first step; the last batch of an epoch is smaller",
        "DataLoader(…, drop_last=True), or pad the last batch; its size must be divisible by the micro-batches",
    ),
    KnownError(
        "async_needs_cpu",
        r"CPU backend must be enabled for async save",
        "async_save needs a process group for CPU tensors",
        "a thread writes the checkpoint from CPU memory and communicates meanwhile; NCCL cannot do that",
        "init_process_group('cpu:gloo,cuda:nccl'), and process_group=dist.new_group(backend='gloo') in async_save",
    ),
    KnownError(
        "key_not_saved",
        r"Missing key in checkpoint state_dict|Size mismatch between saved",
        "the checkpoint does not have what the model asks for",
        "names or shapes of the tensors differ: another model, another wrapper, or an optimizer without state",
        "save and load with get_state_dict and set_state_dict, which use the same names for every wrapper",
    ),
    KnownError(
        "wrapped_names",
        r"(?:Missing|Unexpected) key\(s\) in state_dict",
        "the names in the checkpoint are not those of the model",
        "a wrapper adds a prefix to every name (module. by DDP, _orig_mod. by torch.compile), or the models differ",
        "save model.module.state_dict(), or remove the prefix (consume_prefix_in_state_dict_if_present) before loading",
    ),
    KnownError(
        "nothing_to_optimize",
        r"optimizer got an empty parameter list",
        "an optimizer was created without parameters",
        "all parameters are frozen or belong to other ranks, or an iterator such as model.parameters() was used up "
        "before",
        "pass list(model.parameters()) of a module that trains; create no optimizer on ranks without parameters",
    ),
    KnownError(
        "optimizer_group",
        r"parameter group that doesn't match the size of optimizer's group",
        "the checkpoint's optimizer has other parameter groups",
        "the optimizer was created with other parameters: some are frozen now, or the groups changed",
        "create the optimizer as in the run that saved it, then load; get_state_dict stores its state by name instead",
    ),
    KnownError(
        "no_folder_to_save",
        r"Parent directory .* does not exist",
        "torch.save was given a file in a folder that does not exist",
        "torch.save creates no folders; often one rank or node creates it, and another one saves",
        "os.makedirs(folder, exist_ok=True) on the rank that saves, before torch.save",
    ),
    KnownError(
        "code_in_checkpoint",
        r"Weights only load failed",
        "the checkpoint contains more than tensors",
        "since torch 2.6, torch.load rejects pickled objects, because loading them can run code",
        "save plain tensors and numbers; or allow a class that you trust with torch.serialization.safe_globals",
    ),
    KnownError(
        "saved_on_gpu",
        r"Attempting to deserialize object on (?:a )?CUDA device",
        "the checkpoint was saved on a GPU that this process does not have",
        "torch.load puts each tensor on the device that it was saved from",
        "torch.load(…, map_location='cpu'), then load_state_dict, which copies to the model's device",
    ),
    KnownError(
        "no_gpus",
        r"Torch not compiled with CUDA enabled|no GPUs found|No CUDA GPUs are available",
        "the script uses a GPU, and torch finds none",
        "this torch build is for CPUs, or no GPU or driver is visible in this environment",
        "`labkit doctor` shows build, driver and GPUs; on CPUs use device='cpu' and the backend gloo",
    ),
    KnownError(
        "devices_differ",
        r"Expected all tensors to be on the same device|is not on the expected device",
        "one operation got tensors on different devices",
        "a batch, a mask or a tensor created in forward was not moved to the rank's device",
        "move batches with .to(device), create tensors with device=x.device, and register constants as buffers",
    ),
    KnownError(
        "dtypes_differ",
        r"must have the same dtype, but got|expected scalar type \w+ but found"
        r"|Input type \(.*\) and (?:weight|bias) type \(.*\) should be the same",
        "one operation got tensors of different dtypes",
        "the model is in bf16 or fp16 and its input is not, or a part ran outside of autocast",
        "cast inputs with x.to(next(model.parameters()).dtype); or keep the model in fp32, and run forward and loss in "
        "torch.autocast",
    ),
    KnownError(
        "index_out_of_range",
        r"index out of range in self|Target -?\d+ is out of bounds",
        "a label or token is larger than the model allows",
        "a label ≥ the number of classes, or a token ≥ the size of the embedding, such as that of another tokenizer",
        "compare the largest label or token with the number of classes or rows; cross_entropy ignores ignore_index "
        "(-100) only",
    ),
    KnownError(
        "device_assert",
        r"device-side assert triggered",
        "a GPU kernel stopped at an index that is out of range",
        "usually a label ≥ the number of classes, or a token ≥ the size of the embedding; the line shown may be a "
        "later one",
        "run again with CUDA_LAUNCH_BLOCKING=1, or on the CPU, where the message names the index",
    ),
    KnownError(
        "peer_access",
        r"peer access is not supported between these two devices",
        "two GPUs cannot access each other's memory",
        "a library asked for peer access (P2P) that these GPUs do not have: usual for GeForce cards, in virtual "
        "machines, and in a container that sees only some GPUs of the node",
        "NCCL_P2P_DISABLE=1; in a container, make all GPUs of the node visible; update driver and NCCL, which both "
        "decide which pairs count as peers",
    ),
    KnownError(
        "gpu_fault",
        r"uncorrectable (?:ECC|NVLink) error|Invalid access of peer GPU memory over nvlink|GPU (?:has fallen off|is"
        r" lost)|CUDA error: hardware stack error",
        "a GPU or its link failed",
        "the driver reports an error of the hardware, which no script causes",
        "leave the node out and resume from the last checkpoint; `dmesg | grep Xid` and `nvidia-smi -q -d ECC` tell "
        "what failed, for the administrators",
    ),
    KnownError(
        "fabric_manager",
        r"system not yet initialized",
        "the NVSwitches of the node are not initialized",
        "NVIDIA's Fabric Manager, which GPUs with NVSwitch (HGX, DGX) need, is not running or does not fit the driver",
        "`systemctl status nvidia-fabricmanager` on the node; install its version that equals the driver's",
    ),
    KnownError(
        "illegal_access",
        r"an illegal memory access was encountered|unspecified launch failure|misaligned address"
        r"|CUDA error: an illegal instruction",
        "a GPU kernel accessed memory that is not its own",
        "an index out of range, a tensor that was freed or changed while another stream used it, or a fault of a "
        "custom kernel; the line shown may be a later one",
        "run again with CUDA_LAUNCH_BLOCKING=1, which names the kernel's call, or under `compute-sanitizer`; if it is "
        "always the same node, look for Xid in `dmesg`",
    ),
    KnownError(
        "one_gpu_twice",
        r"Duplicate GPU detected",
        "two ranks use the same GPU",
        "torch.cuda.set_device was not called, so every rank uses GPU 0, or there are more ranks than GPUs",
        "call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before init_process_group, and start one rank per "
        "GPU",
    ),
    KnownError(
        "one_sample",
        r"Expected more than 1 value per channel when training",
        "batch norm got a batch of one sample",
        "it needs a variance over samples; the last batch of an epoch, or a rank's shard of it, has one sample",
        "DataLoader(…, drop_last=True), or a larger batch per rank",
    ),
    KnownError(
        "batch_norm_on_cpu",
        r"SyncBatchNorm layers only work with \w+ modules",
        "SyncBatchNorm got a model in CPU memory",
        "its statistics are computed by kernels that exist for GPUs only",
        "convert the model only if it is on a GPU; on CPU ranks keep BatchNorm, or use GroupNorm or LayerNorm, which "
        "need no statistics of other samples",
    ),
    KnownError(
        "half_gradients",
        r"Attempting to unscale FP16 gradients",
        "GradScaler got parameters in fp16",
        "mixed precision needs fp32 parameters: autocast casts only the operations",
        "do not call model.half(); load the model in fp32 and use autocast(dtype=torch.float16), or use bf16",
    ),
    KnownError(
        "scaler_order",
        r"unscale_\(\) has already been called|No inf checks were recorded",
        "GradScaler was called in the wrong order",
        "each step needs scale(loss).backward(), at most one unscale_, step and update; without a gradient, step "
        "refuses",
        "clip in the last micro-batch only, call update() once per step, and give every optimizer a gradient",
    ),
    KnownError(
        "not_picklable",
        r"Can't (?:pickle|get) local object",
        "an object that is local to a function was passed to another process",
        "spawned processes get their arguments by pickle, which stores functions and classes by name",
        "define the function or class at the top level of the module, and replace lambdas by functools.partial",
    ),
    KnownError(
        "open_files",
        r"Too many open files|received \d+ items of ancdata",
        "the process has too many open files",
        "DataLoader workers pass each tensor through an open file by default",
        "torch.multiprocessing.set_sharing_strategy('file_system'), or raise the limit with `ulimit -n 65536`",
    ),
    KnownError(
        "deepspeed_batch",
        r"train_batch_size is not equal to micro_batch_per_gpu"
        r"|(?:batch size|accumulation steps): -?\d+ has to be greater than 0",
        "DeepSpeed's batch sizes contradict each other",
        "train_batch_size = train_micro_batch_size_per_gpu × gradient_accumulation_steps × ranks",
        "give two of the three in the configuration; DeepSpeed computes the third",
    ),
    KnownError(
        "deepspeed_twice",
        r"has already been reduced\. +Gradient computed twice for this partition",
        "DeepSpeed received the gradient of a parameter twice in one backward",
        "a module is used several times with reentrant checkpointing, or backward is called twice before step()",
        "use checkpoint(…, use_reentrant=False), and call engine.backward once per engine.step()",
    ),
    KnownError(
        "deepspeed_optimizer",
        r"You are using an untested ZeRO Optimizer",
        "DeepSpeed does not know this optimizer",
        "ZeRO shards the state of an optimizer, and was tested with some of them",
        'add "zero_allow_untested_optimizer": true to the configuration',
    ),
    KnownError(
        "loss_scale_at_minimum",
        r"Current loss scale already at minimum",
        "every step overflows in fp16",
        "DeepSpeed halves the loss scale after each overflow; at its minimum, gradients themselves are infinite or NaN",
        "train in bf16 if the GPU supports it; otherwise lower the learning rate and look for the first NaN",
    ),
    KnownError(
        "accelerate_device_map",
        r"loaded with `device_map='auto'` in any distributed mode",
        "a model that is split over GPUs by device_map was started on several ranks",
        "device_map='auto' puts the layers of one process on several GPUs, which ranks would share",
        "load it without device_map and use DDP or FSDP, or start one process",
    ),
    KnownError(
        "port_taken",
        r"EADDRINUSE|[Aa]ddress already in use",
        "the rendezvous port is already in use",
        "another job, or one that was never terminated, listens on the same port",
        "use torchrun --standalone, which picks a free port, or pass a different --master-port; `labkit runs` lists "
        "active runs",
    ),
    KnownError(
        "shared_memory",
        r"(?:out of|insufficient) shared memory|killed by signal: Bus error|creating shared memory"
        r"|(?:shared memory|</torch_|shm).*No space left on device",
        "the shared memory (/dev/shm) is full",
        "NCCL and DataLoader workers pass data through /dev/shm, which often has only 64 MB in a container",
        "start the container with --shm-size=1g or --ipc=host, or use fewer DataLoader workers",
    ),
    KnownError(
        "disk_full",
        r"No space left on device|Disk quota exceeded|the disk that holds the run folder was full",
        "the disk is full",
        "the run writes events, logs, checkpoints and the script's own files; what it could not write is lost",
        "free space on that disk (`labkit clean` deletes recorded runs), or set LABKIT_RUNS to a folder on another "
        "disk",
    ),
    KnownError(
        "samples_of_unequal_size",
        r"stack expects each tensor to be equal size|Trying to resize storage that is not resizable",
        "the samples of a batch have different sizes",
        "DataLoader stacks the samples of a batch into one tensor",
        "pad or crop them, in the data set or in DataLoader(…, collate_fn=…)",
    ),
    KnownError(
        "worker_died",
        r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\) (?:exited unexpectedly|is killed)",
        "a DataLoader worker died",
        "a worker process was killed, often for lack of memory, or crashed in a library that does not survive a fork",
        "run once with num_workers=0, where the error is visible; use fewer workers, or "
        "multiprocessing_context='spawn'",
    ),
    KnownError(
        "no_nccl",
        r"(?:Distributed package doesn't have NCCL|NCCL is not available|No backend type associated with device type"
        r" cuda)",
        "this PyTorch build has no NCCL",
        "NCCL supports NVIDIA GPUs on Linux; builds for Windows, macOS or CPU do not include it",
        "use the gloo backend (the lab's scripts do so without a GPU), or install a CUDA build of PyTorch on Linux",
    ),
    KnownError(
        "lazy_import",
        r"Could not import module '\w+'\. Are this object's requirements defined correctly",
        "transformers could not import one of its modules",
        "a library that this module imports is missing or does not load, most often a torchvision that was built for "
        "another torch; the message does not name it, the first error of the traceback does",
        "read the first error in the stderr; if it names torchvision, install the one of the same release and build as "
        "torch, or uninstall it if the script does not need it",
    ),
    KnownError(
        "torchvision_build",
        r"operator torchvision::\w+ does not exist",
        "torchvision was built for another version or build of torch",
        "its compiled operators do not load next to this torch, such as those of a CUDA build next to a CPU build; "
        "Lightning, transformers and timm import torchvision if it is installed",
        "install the torchvision of the same release and build as torch (`labkit doctor` shows both), or uninstall it "
        "if the script does not need it",
    ),
    KnownError(
        "old_driver",
        r"driver version is insufficient|driver on your system is too old",
        "the NVIDIA driver is too old for this PyTorch build",
        "PyTorch was built for a newer CUDA version than the driver supports",
        "update the driver, or install a PyTorch build for the CUDA version that nvidia-smi shows; `labkit doctor` "
        "shows both versions",
    ),
    KnownError(
        "no_kernel",
        r"no kernel image is available",
        "this PyTorch build has no kernels for this GPU",
        "the PyTorch wheel was compiled for other compute capabilities than the GPU's",
        "install a PyTorch build whose torch.cuda.get_arch_list() includes the GPU's compute capability; `labkit "
        "doctor` compares them",
    ),
    KnownError(
        "forked_cuda",
        r"Cannot re-initialize CUDA in forked subprocess",
        "CUDA was initialized before the process was forked",
        "a forked process cannot use its parent's CUDA context",
        "start workers with the spawn method, and do not use a GPU before that (labkit's kernel never does)",
    ),
    KnownError(
        "no_such_gpu",
        r"invalid device ordinal",
        "the selected GPU does not exist",
        "more ranks run on this machine than it has GPUs, or CUDA_VISIBLE_DEVICES hides some",
        "start at most one rank per GPU (--nproc), and call torch.cuda.set_device(LOCAL_RANK) in each rank",
    ),
    KnownError(
        "collective_timeout",
        COLLECTIVE_TIMEOUT,
        "a collective reached NCCL's timeout",
        "some rank never called this collective, or called it later than the timeout (default: 10 minutes); the rank "
        "that reports the timeout is one that waited",
        "find the rank that is at a different line: read the dumps of the flight recorder, a file per rank (set "
        "TORCH_FR_BUFFER_SIZE=2000 if there are none; TORCH_NCCL_TRACE_BUFFER_SIZE in older versions of torch), or "
        "`py-spy dump` on each rank; raise timeout= of init_process_group only if the ranks really differ by that much",
    ),
    KnownError(
        "nccl",
        r"NCCL (?:error|Error)|ncclUnhandledCudaError|ncclSystemError|unhandled (?:system|cuda)"
        r" error|ncclInternalError",
        "NCCL failed",
        "a link between GPUs, a driver or a network interface failed; NCCL's own log names it",
        "run again with NCCL_DEBUG=INFO and read the first WARN line; NCCL_SOCKET_IFNAME selects the interface "
        "between machines",
    ),
)
NAMES = tuple(known.name for known in KNOWN_ERRORS)


def known_in(text: str) -> KnownError | None:
    """The first error whose message is in a text; None if it has none of them."""
    return next((known for known in KNOWN_ERRORS if re.search(known.pattern, text)), None)
