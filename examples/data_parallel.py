"""Digits by two processes, each with half of every batch: torchrun --nproc-per-node 2 examples/data_parallel.py"""

import os

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import natgrad as ng

for key, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(key, value)  # without torchrun: one process
distributed.init_process_group("gloo")
rank, size = distributed.get_rank(), distributed.get_world_size()

torch.manual_seed(0)
digits = load_digits()
x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)))
opt = ng.kfac(model, nn.CrossEntropyLoss())  # share="memory" leaves each process its part of the state

for batch in torch.randperm(len(x))[:1536].split(256):
    own = batch.chunk(size)[rank]
    opt.zero_grad()
    opt.loss(model(x[own]), y[own]).backward()
    opt.step()

shares = ng.report_sharing(opt)
print(f"process {rank} of {size}: loss {opt.state_report().loss:.3f} (all rows)")
print(f"process {rank} inverts {shares.inversions / shares.all_inversions:.0%} of the work")
distributed.destroy_process_group()
