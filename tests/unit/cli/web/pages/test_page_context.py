from kinetoctl.web.pages.page_context import place_of


def test_a_row_with_a_time_leads_there_with_a_margin() -> None:
    row = {"rank": 3, "start_ns": 10_000_000, "duration_us": 1000.0}
    assert place_of(row, "c1") == "/c/c1/timeline?rank=3&t0=9750000&t1=11250000"
    assert place_of({"time_ns": 10_000_000}, "c1", "2") == "/c/c1/timeline?rank=2&t0=9900000&t1=10100000"


def test_a_finding_leads_to_what_it_is_about() -> None:
    assert place_of({"finding": "sync", "op": "aten::item&x", "kernels": None}, "c1") == (
        "/c/c1/timeline?name=aten%3A%3Aitem%26x"
    )
    assert place_of({"finding": "small", "op": None, "kernels": ["gemm"]}, "c1") == "/c/c1/timeline?name=gemm"


def test_a_row_that_does_not_say_when_it_was_leads_nowhere() -> None:
    assert place_of({"rank": 0, "name": "gemm"}, "c1") == ""
    assert place_of({"finding": "late", "op": None, "kernels": []}, "c1") == ""
