"""On a real GPU: a training loop that runs torch.profiler all the time, and captures of it."""

from __future__ import annotations

import pytest
from campaign.parts.profiler_stress import stress
from support.machine.gpus import torch_with_driver
from support.service.daemon import running_daemon

torch = torch_with_driver()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_own_traces_have_all_kernels_and_every_capture_says_what_became_of_it() -> None:
    with running_daemon() as daemon:
        report = stress(daemon, "CUDA", 28)
    assert report.problems == [], report.own
