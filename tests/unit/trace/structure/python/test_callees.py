"""What C functions are called for, by the names that sources give them."""

import pytest
from kineto_trace.structure.python.callees import callee_kind, callee_samples
from kineto_trace.structure.python.library_calls import CallKind
from support.trace_files.sampled_stacks import MAIN, sampled_trace


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pickle.dumps", CallKind.PICKLE),
        ("marshal.loads", CallKind.PICKLE),
        ("orjson.dumps", CallKind.JSON),
        ("self.scan_once", CallKind.JSON),
        ("loss.item", CallKind.ITEM),
        (".tolist", CallKind.ITEM),
        ("zlib.compress", CallKind.ARCHIVE),
        ("zlib.crc32", CallKind.HASH),
        ("hashlib.sha256", CallKind.HASH),
        (".hexdigest", CallKind.HASH),
        ("gc.collect", CallKind.GARBAGE),
        ("time.sleep", CallKind.SLEEP),
        ("print", CallKind.LOGGING),
        ("sys.stdout.flush", CallKind.LOGGING),
        ("os.fork", CallKind.SUBPROCESS),
        ("os.fsync", CallKind.FILE),
        ("open", CallKind.FILE),
        ("cursor.executemany", CallKind.DATABASE),
        ("np.array", CallKind.CONVERT),
        ("torch.tensor", CallKind.CONVERT),
    ],
)
def test_well_known_names_tell_what_they_are_for(name: str, kind: CallKind) -> None:
    assert callee_kind(name) == kind


@pytest.mark.parametrize(
    "name",
    ["dumps", "digest.update", "len", "file.write", "self.print", "items", "tolist", "my.zlib.compress", "reopen"],
)
def test_a_name_that_may_be_anything_tells_nothing(name: str) -> None:
    assert callee_kind(name) == CallKind.NONE


def test_samples_are_told_by_slice_line_and_callee() -> None:
    found = callee_samples(sampled_trace([(MAIN, "running in len"), MAIN, (MAIN, "idle in time.sleep")]))
    assert [(found.names[name], int(line)) for name, line in zip(found.name, found.line, strict=True)] == [
        ("len", 42),
        ("time.sleep", 42),
    ]
    assert found.counts.tolist() == [[0, 1, 0, 0], [0, 0, 0, 1]]
