"""Data sets as people write them: files of lines, tables, data bases and services; causes that were kept aside."""

import hashlib
import http.server
import json
import re
import sqlite3
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from rootcause.programs.clock import Clock

ROWS, WIDTH, BATCH = 512, 48, 32
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]?\d+)?")


class Rows(Dataset[Tensor]):
    """Rows in memory."""

    def __init__(self) -> None:
        self.rows = torch.randn(ROWS, WIDTH)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> Tensor:
        return self.rows[number]


class JsonLines(Rows):
    """A line of JSON for each row, that is parsed and normalised when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = [
            json.dumps({"id": n, "text": "x " * 40, "values": (row.tolist() * 8)}) for n, row in enumerate(self.rows)
        ]

    def __getitem__(self, number: int) -> Tensor:
        return self.parse(self.lines[number])

    def parse(self, line: str) -> Tensor:
        """The values of a line."""
        return torch.tensor(json.loads(line)["values"][:WIDTH])


class Pattern(Rows):
    """A line of text for each row, read by a regular expression."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = [" ".join(f"{value:.6f}" for value in row.tolist() * 6) for row in self.rows]

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor([float(found) for found in NUMBER.findall(self.lines[number])][:WIDTH])


class Table(Rows):
    """Rows in a data base, a query for each."""

    def __init__(self) -> None:
        super().__init__()
        self.base = sqlite3.connect(Path(tempfile.mkdtemp(prefix="rootcause-"), "rows.db"))
        self.base.execute("CREATE TABLE cells (row INTEGER, place INTEGER, value REAL)")
        cells = [(n, place, value) for n, row in enumerate(self.rows[:64].tolist()) for place, value in enumerate(row)]
        self.base.executemany("INSERT INTO cells VALUES (?, ?, ?)", cells)
        self.base.commit()

    def __getitem__(self, number: int) -> Tensor:
        query = "SELECT value FROM cells WHERE row = ? ORDER BY place"
        return torch.tensor([value for (value,) in self.base.execute(query, (number % 64,))])


class Service(Rows):
    """Rows of a service over HTTP."""

    def __init__(self) -> None:
        super().__init__()
        rows = self.rows.numpy()

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = rows[int(self.path[1:])].tobytes()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                """Nothing."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=server.serve_forever, name="server", daemon=True).start()
        self.address = f"http://127.0.0.1:{server.server_port}"

    def __getitem__(self, number: int) -> Tensor:
        return self.rows[number] if number % 16 else self.fetch(number)

    def fetch(self, number: int) -> Tensor:
        """A row of the service."""
        with urllib.request.urlopen(f"{self.address}/{number}") as answer:
            return torch.frombuffer(bytearray(answer.read()), dtype=torch.float32)


class Stream(IterableDataset[Tensor]):
    """A stream that is shuffled and cleaned in a worker."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        generator = np.random.default_rng(0 if info is None else info.id)
        while True:
            yield self.clean(generator.standard_normal(WIDTH))

    def clean(self, values: Any) -> Tensor:
        """A row without outliers."""
        kept = [min(max(float(value), -2.0), 2.0) for _ in range(8) for value in values]
        return torch.tensor(kept[:WIDTH])


def pad_and_mask(rows: list[Tensor]) -> Tensor:
    """A batch of rows of different lengths, some values hidden."""
    batch = torch.zeros(len(rows), WIDTH)
    for number, row in enumerate(rows):
        for place in range(0, WIDTH, 3):
            batch[number, place] = row[place]
    return batch


class Seen:
    """Tells which batches were seen before."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def __call__(self, batch: Tensor) -> bool:
        for row in batch.repeat(8, 1):
            key = hashlib.md5(row.numpy().tobytes(), usedforsecurity=False).hexdigest()
            self.keys.add(key)
        return key in self.keys


SETS = {"json_lines": JsonLines, "patterns": Pattern, "rows_of_a_data_base": Table, "rows_of_a_service": Service}


def main(planted: str) -> None:
    clock, seen = Clock(), Seen()
    data = SETS.get(planted, Rows)()
    loader: Any = DataLoader(data, BATCH, shuffle=True, collate_fn=pad_and_mask if planted == "padding" else None)
    if planted == "stream":
        loader = DataLoader(Stream(), BATCH, num_workers=1)
    model = nn.Sequential(
        nn.Linear(WIDTH, 512), nn.Tanh(), *[nn.Linear(512, 512) for _ in range(6)], nn.Linear(512, WIDTH)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    while True:
        for batch in loader:
            if planted == "seen_before":
                seen(batch)
            optimizer.zero_grad()
            F.mse_loss(model(batch), batch).backward()
            optimizer.step()
            if clock.over():
                return
