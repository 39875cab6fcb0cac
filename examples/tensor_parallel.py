"""Digits with layers cut over two processes: torchrun --nproc-per-node 2 examples/tensor_parallel.py"""

import os

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import natgrad as ng

for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(key, value)  # without torchrun: one process
distributed.init_process_group("gloo")
rank, size = distributed.get_rank(), distributed.get_world_size()
mesh = init_device_mesh("cpu", (size,))

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
opt = ng.kfac(model, nn.CrossEntropyLoss())  # built after parallelize_module

for batch in torch.randperm(len(x))[:1536].split(256):
    opt.zero_grad()
    opt.loss(model(x[batch]), y[batch]).backward()
    opt.step()

print(f"process {rank} of {size}: loss {opt.state_report().loss:.3f}")
distributed.destroy_process_group()
