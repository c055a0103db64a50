# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: -jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Kaggle with two T4, and Colab
#
# Neither was run for this page: the steps follow the documentation of the two services and of PyTorch.
#
# **Kaggle.** In the notebook's settings choose the accelerator *GPU T4 x2* and switch the internet on. Then
#
# ```text
# !git clone --depth 1 <the address of this repository> lab
# %cd lab
# !python3 -m labkit doctor
# ```
#
# Or upload a lab from your machine: `python3 -m labkit notebook labs/03_ddp.py -o kaggle/ddp.ipynb --kaggle USER`
# writes the notebook and a `kernel-metadata.json` that asks for two T4; `kaggle kernels push -p kaggle` sends both.
#
# Ranks cannot be started with `notebook_launcher` or `mp.spawn` once the kernel has used a GPU (`Cannot re-initialize
# CUDA in forked subprocess`). The lab starts them with torchrun, as separate processes, and its kernel never
# touches a GPU.
#
# A T4 has 16 GB, no bf16 in hardware and no NVLink: use `precision="fp16"`. NCCL sends over PCIe.
#
# **Colab** has one GPU. With `nproc=2` on one GPU, NCCL fails with `Duplicate GPU detected`. Two CPU ranks work, and so
# does every lab of this course:

# %%
from labkit import place, run

HERE = place(2)  # two GPUs if this machine has them, otherwise two CPU ranks
print(HERE)

# %%
job = run("ddp", **HERE, workload="mlp", steps=6).wait()
print(job.words, "·", job.state.world_size, "ranks on", HERE["device"])
