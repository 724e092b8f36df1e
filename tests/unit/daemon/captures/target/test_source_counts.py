from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.captures.target.arena_reader import ArenaCounts
from kinetod.captures.target.source_counts import noted_ways, source_counts


def test_a_source_says_how_it_records() -> None:
    ways = noted_ways({"torch_ops": {"way": "observer, torch 2.13.0"}, "cupti": {"version": 26}})
    counts = {
        "torch_ops": ArenaCounts(records=3, bytes=192, dropped=1),
        "cupti": ArenaCounts(records=2, bytes=100, dropped=0),
    }
    assert source_counts(counts, ways) == [
        pb.SourceCounts(source="torch_ops", records=3, bytes=192, dropped=1, way="observer, torch 2.13.0"),
        pb.SourceCounts(source="cupti", records=2, bytes=100),
    ]


def test_what_is_no_text_is_not_believed_and_text_is_made_safe() -> None:
    assert noted_ways({"a": {"way": 5}, "b": {"way": ["x"]}, "c": {"way": ""}}) == {}
    assert noted_ways({"a": {"way": "observer\x1b[31m\n\ud800" + "x" * 300}})["a"].startswith("observer [31m ?xxx")
    assert len(noted_ways({"a": {"way": "x" * 300}})["a"]) == 200
