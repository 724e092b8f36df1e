"""Merges a Kineto configuration into the options of `kinetoctl trace`; the options take precedence."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from kineto_protos.kineto_config import (
    KinetoConfig,
    KinetoConfigError,
    RequestedCapture,
    is_inline,
    merged,
    parse,
    parse_inline,
    request,
)
from kineto_protos.options import Parsed
from kineto_trace.store.requested_names import LogFile, parse_log_file

from kinetoctl.options.capture_spec import OPERATOR_OPTIONS, TraceOptions

_TIMED = ("duration", "warmup", "start_at")
_ITERATED = ("iterations", "start_iteration", "roundup", "warmup_iterations", "or_duration")
_RECORDING = (
    *("activities", "record_shapes", "with_stack", "with_modules", "with_flops", "memory"),
    "counters",
    "buffer_limit",
)
MAX_FILE_CHARS = 1 << 20


def read_config(text: str) -> KinetoConfig:
    """The configuration in KEY=VALUE,… or in the file that the text names. Raises ValueError."""
    if is_inline(text):
        return parse_inline(text)
    try:
        with Path(text).open(encoding="utf-8", errors="replace") as stream:
            content = stream.read(MAX_FILE_CHARS + 1)
    except OSError as exc:
        raise ValueError(f"expected KEY=VALUE,… or a file, got {text!r:.200}: {exc.strerror}") from exc
    if len(content) > MAX_FILE_CHARS:
        raise ValueError(f"{text} is too large for a configuration (limit: 1 MiB)")
    return parse(content, text)


KINETO_CONFIG = Parsed("file|key=value,…", read_config)


def option_name(attribute: str) -> str:
    """The option of an attribute: --start-at for start_at."""
    return f"--{attribute.replace('_', '-')}"


def asked_for(configs: Sequence[KinetoConfig], now_ns: int) -> RequestedCapture:
    """What all configurations together request; later ones take precedence. Raises UsageError."""
    try:
        return request(merged(configs), now_ns)
    except KinetoConfigError as exc:
        raise click.UsageError(f"--kineto-config: {exc}") from exc


def configured(options: TraceOptions, asked: RequestedCapture) -> tuple[TraceOptions, LogFile | None, list[str]]:
    """The options, completed by the configuration; the file names that it requests; and notes for the user.

    Raises UsageError.
    """
    wanted = {name: getattr(asked, name) for name in (*_TIMED, *_ITERATED, *_RECORDING)}
    wanted["with_stack"] = "sample" if asked.with_stack else None
    notes = list(asked.notes)
    notes += _drop_other_extent(options, wanted, asked)
    for name, value in wanted.items():
        given = getattr(options, name)
        if given is None or given == value or value is None:
            continue
        if origin := asked.origins.get(name):
            notes.append(f"{origin}: no effect: {option_name(name)} takes precedence")
    values = {name: value for name, value in wanted.items() if value is not None and getattr(options, name) is None}
    notes += _drop_operator_options(options, values, asked)
    labels = dict(asked.labels) | dict(options.labels)
    result = replace(options, **values, labels=tuple(labels.items()))
    return *_with_files(result, asked, notes), notes


def _drop_other_extent(options: TraceOptions, wanted: dict[str, Any], asked: RequestedCapture) -> Iterator[str]:
    """Drops the configuration's iterations if a duration is given on the command line, and vice versa."""
    if options.duration is not None:
        chosen, others = "duration", frozenset(_ITERATED)
    elif options.iterations is not None:
        chosen, others = "iterations", frozenset(_TIMED)
    else:
        return
    for name in sorted(others & wanted.keys()):
        if wanted.pop(name) is not None and name in asked.origins:
            yield f"{asked.origins[name]}: no effect: {option_name(chosen)} takes precedence"


def _drop_operator_options(options: TraceOptions, values: dict[str, Any], asked: RequestedCapture) -> Iterator[str]:
    """Drops options that describe operators if none are recorded: Kineto accepts and ignores them there."""
    activities = options.activities or values.get("activities")
    if activities and "cpu_op" not in activities:
        for name in OPERATOR_OPTIONS:
            if values.pop(name, None):
                yield f"{asked.origins[name]}: no effect: it describes cpu_op, which is not recorded"


def _with_files(
    options: TraceOptions, asked: RequestedCapture, notes: list[str]
) -> tuple[TraceOptions, LogFile | None]:
    if asked.log_file is None:
        return options, None
    where = asked.origins["log_file"]
    try:
        log_file = parse_log_file(asked.log_file)
    except ValueError as exc:
        raise click.UsageError(f"--kineto-config: {where}: {exc}") from exc
    directory = log_file.directory
    if options.output_dir is not None and options.output_dir.absolute() != directory.absolute():
        notes.append(f"{where}: its folder has no effect: --output-dir takes precedence")
        directory = options.output_dir
    if options.formats and log_file.format not in options.formats:
        notes.append(f"{where}: its suffix has no effect: --format takes precedence")
    formats = options.formats or (log_file.format,)
    return replace(options, output_dir=Path(directory), formats=formats), log_file
