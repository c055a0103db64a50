"""A small model, its data, and a log entry, for the scripts of this folder."""

import datetime

import torch
from torch import nn
from torch.monitor import Event, log_event
from torch.utils.data import DataLoader, TensorDataset


def log(name, **data):
    log_event(Event(name, datetime.datetime.now(), data))


def mlp(width=16):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))


def loader(samples=24, batch_size=8):
    return DataLoader(TensorDataset(torch.randn(samples, 8), torch.randint(0, 3, (samples,))), batch_size=batch_size)
