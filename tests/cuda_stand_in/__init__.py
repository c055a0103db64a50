"""A CUDA machine that needs no GPU: a library that is loaded before the CUDA build of torch and answers for the CUDA
runtime and driver, cuBLAS, cuDNN, CUPTI, NCCL and NVML.

Device memory is host memory. Kernels compute nothing and take a fixed time on their stream; copies, events, waits
between streams and collectives happen in stream order, asynchronously. It shows which code runs, in which order, with
which synchronisation, memory and traffic, and no values: losses and gradients mean nothing.

    python -m cuda_stand_in t4x2 train.py          # a program of the CUDA environment on two T4s
    python -m cuda_stand_in t4x2 -m labkit run ddp

`environment.python()` gives the Python of the CUDA environment, `library.built()` the folder of the library, and
`machines.variables(machine, folder)` the environment variables of a process on that machine.
"""
