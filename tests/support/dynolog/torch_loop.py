"""Program: trains a small model until its standard input ends, prepared for Dynolog or not. Says "ready" first."""

import os
import sys
import threading
import time

import torch

threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batch = torch.randn(32, 64)
sys.stdout.write("ready\n")
sys.stdout.flush()
while True:
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    time.sleep(0.001)
