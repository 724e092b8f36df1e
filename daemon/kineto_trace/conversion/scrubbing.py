"""A trace without what may be private: for a bug report, or for a colleague elsewhere.

Theory of operation
    What analyses need stays: times, numbers, the names of operators, kernels, functions, annotations and threads, and
    the names of files. Everything else goes, unless it is known to be harmless: a text among the arguments of an event
    or in the head of a file stays only under a known key. So a tool that writes something new, such as its environment,
    gives nothing away.

    In the names that stay, folders are cut off, but not inside a package or Python itself, so that functions of
    libraries are still recognised as such. Addresses, tokens, the host and users whose home folders the trace names are
    replaced.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from kineto_trace.base.array_types import Flags
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import Trace
from kineto_trace.structure.event_arguments import parse
from kineto_trace.structure.library_calls import code_place, is_users

_LIBRARY = re.compile(r".*(?=/(?:(?:site|dist)-packages|lib(?:64)?/python3[^/]*)/)", re.DOTALL)
_HOME = re.compile(r"[/\\](?:home|[Uu]sers)[/\\]([^/\\\s\"':;]{3,})")
_WORDS = (
    (re.compile(r"\b[A-Za-z][\w+.-]{0,20}://[^\s\"']+"), "URL"),
    (re.compile(r"[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+"), "EMAIL"),
    (re.compile(r"\b(?:sk-|hf_|gh[pousr]_|glpat-|xox[abprs]-|AKIA|ASIA|ya29\.|eyJ)[\w.-]{8,}"), "TOKEN"),
    (re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b|\b(?:[0-9A-Fa-f]{1,4}:){3,}:?(?:[0-9A-Fa-f]{1,4}:?)*"), "ADDRESS"),
)
_PATH = re.compile(r"(?<![\w.)\]}-])(?:~[\w.-]*|[A-Za-z]:)?(?:[/\\]{1,2}[^/\\\s\"'`:;,<>|()\[\]{}*?]+){2,}")
_JSON_COLUMNS = ("inputs", "args", "members")
_KEPT = {  # keys whose texts stay
    "Input type", "Input Dims", "Input Strides", "Output type", "dtype", "Collective name", "Process Group Name",
    "Process Group Description", "Module Hierarchy", "name", "labels", "cat", "ph", "s", "id", "bp", "cname", "scope",
    "backend", "displayTimeUnit", "version", "framework", "python_version", "source", "kinds", "activity_types",
    "capture_id", "unit",
}  # fmt: skip
_CONTAINERS = {"", "deviceProperties", "distributedInfo", "kinetod", "coverage"}  # in which such keys mean that
_STACKS = {"Call stack"}
_NUMBER = re.compile(r"[\d.,e+\-\[\] ]*|True|False|None", re.IGNORECASE)
_NUMBERS = {"Concrete Inputs", "Process Group Ranks"}  # texts that are numbers stay
_SCRUBBED = '"scrubbed": true'  # in place of arguments without anything that stays
_NOT_RECORDED = "could not be recorded"
_UNKNOWN = "a key that says nothing"


def scrubbed(trace: Trace) -> Trace:
    """Returns the trace without paths, hosts, users, commands, environments and other text that no analysis needs."""
    words = _Words(trace)
    in_json, places = (np.zeros(len(trace.strings), np.bool_) for _ in range(2))
    for table in trace.tables.values():
        for name, column in (*table.columns.items(), *table.origin.items()):
            if name in _JSON_COLUMNS:
                _mark(in_json, column)
        if table.kind == "python_function":
            _mark(places, table["name"])
    strings = [
        words.members(text) if json_text else words.place(text) if place else words.name(text)
        for text, json_text, place in zip(trace.strings, in_json.tolist(), places.tolist(), strict=True)
    ]
    return replace(
        trace,
        target=_scrubbed_target(trace.target, words),
        strings=strings,
        devices=[words.value(device) for device in trace.devices],
        head=None if trace.head is None else {name: words.head(name, text) for name, text in trace.head.items()},
        notes=[words.name(note) for note in trace.notes],
    )


def _mark(flags: Flags, numbers: Any) -> None:
    flags[numbers[numbers >= 0]] = True


def _scrubbed_target(target: TargetInfo, words: "_Words") -> TargetInfo:
    return replace(
        target,
        host=words.value(target.host, "host"),
        process_name=words.name(target.process_name),
        command=[],
        job_id="",
        labels={},
        resource={},
        trace_parent="",
        threads={thread: words.name(name) for thread, name in target.threads.items()},
        settings={name: value for name, value in target.settings.items() if not isinstance(value, str)},
        kernel_counters=words.value(target.kernel_counters, "kernel_counters"),
        not_recorded=words.value(target.not_recorded, "not_recorded"),
    )


class _Words:
    """Replaces private parts of texts. The host and the users are those that the trace names anywhere."""

    def __init__(self, trace: Trace) -> None:
        head = "".join(trace.head.values()) if trace.head else ""
        texts: Iterable[str] = (*trace.strings, *trace.target.command, head)
        users = {user for text in texts for user in _HOME.findall(text)}
        stated = [_read(text) for name, text in (trace.head or {}).items() if "host" in name.lower()]
        hosts = {name for name in (trace.target.host, *stated) if isinstance(name, str) and len(name) > 2}
        known = [(hosts, "host"), (users, "user")]
        self._known = [
            (re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, sorted(names)))})(?![A-Za-z0-9])"), word)
            for names, word in known
            if names
        ]

    def name(self, text: str) -> str:
        """Returns a name, or any other short text."""
        for pattern, word in _WORDS:
            text = pattern.sub(word, text)
        text = _PATH.sub(lambda match: _file(match[0]), text)
        for pattern, word in self._known:
            text = pattern.sub(word, text)
        return text

    def place(self, text: str) -> str:
        """Returns the name of a Python function."""
        found = code_place(text)
        if not found.file:
            return self.name(text)
        file = _file(found.path)
        file = file.rpartition("/")[2] if is_users(found) else file
        return f"{self.name(file)}({found.line}): {self.name(found.function)}"

    def members(self, text: str) -> str:
        """Returns members of a JSON object, without the braces."""
        kept = json.dumps(self.value(parse(text)), ensure_ascii=False, separators=(",", ":"))[1:-1]
        return kept or _SCRUBBED

    def head(self, name: str, text: str) -> str:
        """Returns a member of a file's head as JSON text."""
        return json.dumps(self.value(_read(text), name), ensure_ascii=False)

    def value(self, value: Any, key: str = "") -> Any:
        """Returns a value of JSON: numbers, and texts under known keys. Texts in lists leave an empty one."""
        if key in ("notes", "not_recorded"):  # sentences, which may say anything
            return dict.fromkeys(value, _NOT_RECORDED) if isinstance(value, Mapping) else []
        if isinstance(value, Mapping):
            inside = {name: name if key in _CONTAINERS else _UNKNOWN for name in value}
            kept = {self.name(name): self.value(inner, inside[name]) for name, inner in value.items()}
            return {name: inner for name, inner in kept.items() if inner not in ("", {})}
        if isinstance(value, list):
            return [self.value(inner, key) for inner in value]
        if not isinstance(value, str):
            return value
        if key in _STACKS:
            return ";".join(map(self.place, value.split(";")))
        if "host" in key.lower():
            return value and "host"
        if key in _NUMBERS:
            return value if _NUMBER.fullmatch(value) else ""
        return self.name(value) if key in _KEPT else ""


def _read(text: str) -> Any:
    """Returns a member of a head; None if it is not valid."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _file(path: str) -> str:
    """Returns the path from its package or from Python on; otherwise the name of the file."""
    path = path.replace("\\", "/")
    if match := _LIBRARY.match(path):
        return path[match.end() :]
    return path.rpartition("/")[2] if path.startswith(("/", "~")) or path[1:3] == ":/" else path
