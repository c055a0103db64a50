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
# # Windows and WSL2
#
# Not run for this page: it follows PyTorch's documentation.
#
# PyTorch for Windows has no NCCL. On Windows itself, use CPU ranks with gloo, as this lab does by default; the warm
# server is not used there, so a start takes longer. For GPUs, use **WSL2**, which is Linux:
#
# 1. `wsl --install` in an administrator's PowerShell, then restart. Install the NVIDIA driver **in Windows only**.
# 2. In the Linux terminal: `nvidia-smi` must show the GPU. Do not install a driver there.
# 3. Clone this repository into the Linux file system (`~`, not `/mnt/c`, which is slow), and run
#    `python3 -m labkit lab`. Open the address that it prints in the browser of Windows.
#
# If NCCL hangs or fails at the first collective in WSL2, set `NCCL_P2P_DISABLE=1`: not all drivers support peer access
# there. `.wslconfig` limits memory and cores of WSL2; the default is half of the machine's memory.
#
# What the lab finds on this machine:

# %%
import platform

from labkit import place

print(platform.system(), platform.release())
print(place(2))
