"""How long the pages of `kinetoctl web` take on one trace: each until it is complete, without a browser.

    taskset -c 0,1 python tests/bench/web_pages.py trace.json

A line for the first page, for the page of the trace (which reads it), for each flame graph and for the slowest views,
in ms.
"""

import argparse
import re
import time
from pathlib import Path

from support.web.browsing import Browser, browsing

SLOWEST = 8


def seconds(server: Browser, path: str) -> float:
    """How long a page takes until it has its results."""
    begin = time.perf_counter()
    server.shown(path)
    return time.perf_counter() - begin


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    with browsing([parser.parse_args().trace]) as server:
        print(f"{1000 * seconds(server, '/'):8.0f} ms  first page")
        (trace_id,) = re.findall(r'href="/c/(\w+)"', server.ask("/").text)
        print(f"{1000 * seconds(server, f'/c/{trace_id}'):8.0f} ms  the trace, which is read")
        for of in ("ops", "kernels", "python"):
            for order in ("merged", "time", "sandwich"):
                taken_s = seconds(server, f"/c/{trace_id}/flame?of={of}&order={order}")
                print(f"{1000 * taken_s:8.0f} ms  flame graph of {of}, {order}")
        views = re.findall(r'/view/(\w+)"', server.ask(f"/c/{trace_id}").text)
        taken = {view: seconds(server, f"/c/{trace_id}/view/{view}") for view in views if not view.startswith("diff_")}
        for view in sorted(taken, key=lambda view: -taken[view])[:SLOWEST]:
            print(f"{1000 * taken[view]:8.0f} ms  {view}")


if __name__ == "__main__":
    main()
