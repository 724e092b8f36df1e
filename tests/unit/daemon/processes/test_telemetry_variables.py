from kinetod.processes.telemetry_variables import MAX_ATTRIBUTES, MAX_BYTES, resource, trace_parent

VALID = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_valid_trace_context_is_taken_and_no_other() -> None:
    assert trace_parent({"TRACEPARENT": VALID}) == VALID
    assert trace_parent({"TRACEPARENT": "00-1"}) == ""
    assert trace_parent({"TRACEPARENT": f"01{VALID[2:]}-{'x' * 99}"}) == ""  # too long
    assert trace_parent({}) == ""


def test_attributes_are_decoded_and_the_service_s_own_variable_counts_more() -> None:
    environ = {
        "OTEL_RESOURCE_ATTRIBUTES": "service.name=a, team=b%2Cc%20d ,odd name=x,nothing,empty=",
        "OTEL_SERVICE_NAME": "trainer",
    }
    assert resource(environ) == {"service.name": "trainer", "team": "b,c d"}


def test_without_that_variable_the_attribute_names_the_service() -> None:
    assert resource({"OTEL_RESOURCE_ATTRIBUTES": "service.name=a"}) == {"service.name": "a"}


def test_a_process_that_says_much_is_cut_short_and_its_service_stays() -> None:
    many = ",".join(f"k{number}=v" for number in range(1000))
    found = resource({"OTEL_RESOURCE_ATTRIBUTES": many, "OTEL_SERVICE_NAME": "trainer"})
    assert (len(found), found["service.name"]) == (MAX_ATTRIBUTES, "trainer")
    long = ",".join(f"k{number}={'é' * 100}" for number in range(9))
    found = resource({"OTEL_RESOURCE_ATTRIBUTES": long})
    assert 0 < sum(len(name) + len(value.encode()) for name, value in found.items()) <= MAX_BYTES


def test_controls_and_bytes_that_are_no_text_are_replaced() -> None:
    assert resource({"OTEL_RESOURCE_ATTRIBUTES": "a=x%0Ay,b=%FF"}) == {"a": "x y", "b": "\ufffd"}
