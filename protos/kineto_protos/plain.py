"""Protobuf messages as plain values, the one form of JSON that kinetoctl and the daemon's hooks use, and as texts.

Fields have their names from profiler.proto, enums are names, integers stay integers, absent optional
fields are null, and all other fields are always present.
"""

from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb


def _scalar(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    return plain(value) if field.message_type is not None else value


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if _is_map(field):
        item = field.message_type.fields_by_name["value"]
        return {key: _scalar(item, value[key]) for key in sorted(value)}
    if not isinstance(value, Message | str | bytes) and hasattr(value, "__len__"):
        return [_scalar(field, item) for item in value]
    if field.has_presence and not message.HasField(field.name):
        return None
    return _scalar(field, value)


def plain(message: Message) -> dict[str, Any]:
    """The message as a dictionary of JSON values."""
    return {field.name: _value(message, field) for field in message.DESCRIPTOR.fields}


def standing_text(call: "pb.StandingCall", pid: int, lasted: str) -> str:
    """Describes a blocked call: its process, how long it has lasted and the capture."""
    last = call.call == "cuptiFinalize"
    where = f"a thread of {'' if last else 'the agent in '}process {pid}"
    launches = "the program's launches wait" if last else "launches into the busy context wait"
    return (
        f"{where} has been inside {call.call} for {lasted} (capture {call.capture_id}): "
        f"it is waiting for the GPU to become idle, and {launches} with it"
    )
