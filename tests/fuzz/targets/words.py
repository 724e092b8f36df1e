"""What people and files say to kinetoctl: libkineto.conf, options, lists of hosts; and texts for terminals."""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kineto_protos import endpoints, kineto_config
from kineto_trace.base.visible_text import in_json, one_line, visible
from kinetoctl.base import value_types
from kinetoctl.client import host_targets, slurm

NOW_NS = 1_795_163_478_000_000_000
PARSERS: tuple[Callable[[str], object], ...] = (
    value_types.parse_positive_duration_ns, value_types.parse_delay_ns, value_types.parse_keep_ns,
    value_types.parse_ranks,
    value_types.parse_positive_size_bytes, value_types.parse_ranks_or_all, value_types.parse_gpus,
    value_types.parse_pod_uid,
    value_types.parse_container_id, value_types.parse_label, value_types.parse_activities, value_types.parse_start_ns,
    value_types.parse_regex, endpoints.parse_address, slurm.parse_slurm_job, host_targets.parse_template,
)  # fmt: skip
_hosts = Path(tempfile.mkdtemp(prefix="fuzz-words-")) / "hosts"


def play(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for parse in PARSERS:
        try:
            parse(text)
        except ValueError:
            continue
    for read in (kineto_config.parse, kineto_config.parse_inline):
        try:
            kineto_config.request(read(text), NOW_NS)
        except kineto_config.KinetoConfigError:
            continue
    _hosts.write_bytes(data)
    with contextlib.suppress(ValueError):
        host_targets.parse_hosts(f"@{_hosts}", "{host}:9009")
    assert one_line(text).isprintable() or not any(ord(char) < 32 for char in one_line(text))
    visible(text).encode()
    if not text.encode("utf-8", "surrogateescape") == data:
        raise AssertionError("the text is another one")
    whole = json.dumps(data.decode("utf-8", "replace"), ensure_ascii=False)
    assert json.loads(in_json(whole)) == json.loads(whole)


def seeds() -> Iterator[bytes]:
    """One of each."""
    yield b"ACTIVITIES_DURATION_MSECS=500\nACTIVITIES_LOG_FILE=/tmp/x.json\nPROFILE_START_TIME=0\n# words\n"
    yield b"ACTIVITY_TYPES=cpu_op,kernel\nPROFILE_REPORT_INPUT_SHAPES=true\nPROFILE_START_ITERATION=5\n"
    yield b"ACTIVITIES_ITERATIONS=3;PROFILE_START_ITERATION_ROUNDUP=100;ACTIVITIES_WARMUP_ITERATIONS=2"
    for text in ("1h30m", "0-7,9", "64MiB", "team=ml", "42_3+1.0", "unix:/run/kineto/kinetod.sock", "n1\nn2 h:9009\n",
                 "2026-11-22T10:00:00Z", "{host}:9009", "\x1b[2J\u202e", "(a|b)+$"):  # fmt: skip
        yield text.encode()
