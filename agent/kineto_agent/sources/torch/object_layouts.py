"""Where things lie in torch's objects, by minor version: byte offsets in 64-bit Linux builds. Generated.

agent/native/torch/generate_torch_layouts.py made this from the headers in torch's wheels. The names are those of
kc_observer_layout
(agent/native/torch/observer.h). A version that was built with either string of libstdc++ has two layouts; which one a
torch keeps to is seen when it is tried (kc_observer_open).
"""

from typing import Dict, NamedTuple, Tuple


class TorchLayout(NamedTuple):
    """kc_observer_layout, and the names of the types as Kineto writes them, by at::ScalarType."""

    function_bytes: int
    function_scope: int
    function_sequence: int
    function_inputs: int
    function_forward_thread: int
    value_bytes: int
    value_payload: int
    value_tag: int
    tag_none: int
    tag_tensor: int
    tag_double: int
    tag_int: int
    tag_bool: int
    tag_list: int
    list_values: int
    tensor_storage: int
    tensor_sizes: int
    tensor_dtype: int
    tensor_policy: int
    tensor_policy_mask: int
    tensor_symbolic: int
    tensor_symbolic_mask: int
    sizes_count: int
    sizes_values: int
    sizes_inline: int
    storage_data: int
    string_bytes: int
    comms_kind: int
    comms_group: int
    comms_description: int
    comms_name: int
    comms_rank: int
    comms_world: int
    comms_first: int
    comms_stride: int
    comms_in: int
    comms_out: int
    comms_dtype: int
    comms_in_splits: int
    comms_out_splits: int
    comms_ranks: int
    comms_sequence: int
    comms_transfer: int
    dtypes: int
    dtype_names: Tuple[str, ...]


_DTYPES_2_4: Tuple[str, ...] = (
    "unsigned char",
    "signed char",
    "short int",
    "int",
    "long int",
    "c10::Half",
    "float",
    "double",
    "c10::complex<c10::Half>",
    "c10::complex<float>",
    "c10::complex<double>",
    "bool",
    "c10::qint8",
    "c10::quint8",
    "c10::qint32",
    "c10::BFloat16",
    "c10::quint4x2",
    "c10::quint2x4",
    "c10::bits1x8",
    "c10::bits2x4",
    "c10::bits4x2",
    "c10::bits8",
    "c10::bits16",
    "c10::Float8_e5m2",
    "c10::Float8_e4m3fn",
    "c10::Float8_e5m2fnuz",
    "c10::Float8_e4m3fnuz",
    "short unsigned int",
    "unsigned int",
    "long unsigned int",
    "c10::dummy_uint1_7_t<1>",
    "c10::dummy_uint1_7_t<2>",
    "c10::dummy_uint1_7_t<3>",
    "c10::dummy_uint1_7_t<4>",
    "c10::dummy_uint1_7_t<5>",
    "c10::dummy_uint1_7_t<6>",
    "c10::dummy_uint1_7_t<7>",
)

_DTYPES_2_6: Tuple[str, ...] = (
    *_DTYPES_2_4,
    "c10::dummy_int1_7_t<1>",
    "c10::dummy_int1_7_t<2>",
    "c10::dummy_int1_7_t<3>",
    "c10::dummy_int1_7_t<4>",
    "c10::dummy_int1_7_t<5>",
    "c10::dummy_int1_7_t<6>",
    "c10::dummy_int1_7_t<7>",
)

_DTYPES_2_7: Tuple[str, ...] = (
    *_DTYPES_2_6,
    "c10::Float8_e8m0fnu",
)

_DTYPES_2_8: Tuple[str, ...] = (
    *_DTYPES_2_7,
    "c10::Float4_e2m1fn_x2",
)

_DTYPES_2_14: Tuple[str, ...] = (
    *_DTYPES_2_8,
    "c10::complex<c10::BFloat16>",
)


_TORCH_2_15 = TorchLayout(
    function_bytes=344,
    function_scope=96,
    function_sequence=200,
    function_inputs=208,
    function_forward_thread=304,
    value_bytes=16,
    value_payload=0,
    value_tag=8,
    tag_none=0,
    tag_tensor=1,
    tag_double=3,
    tag_int=5,
    tag_bool=10,
    tag_list=14,
    list_values=16,
    tensor_storage=16,
    tensor_sizes=56,
    tensor_dtype=160,
    tensor_policy=166,
    tensor_policy_mask=12,
    tensor_symbolic=166,
    tensor_symbolic_mask=16,
    sizes_count=0,
    sizes_values=8,
    sizes_inline=5,
    storage_data=16,
    string_bytes=32,
    comms_kind=0,
    comms_group=40,
    comms_description=8,
    comms_name=80,
    comms_rank=72,
    comms_world=76,
    comms_first=184,
    comms_stride=188,
    comms_in=112,
    comms_out=120,
    comms_dtype=128,
    comms_in_splits=136,
    comms_out_splits=160,
    comms_ranks=192,
    comms_sequence=224,
    comms_transfer=232,
    dtypes=47,
    dtype_names=_DTYPES_2_14,
)
_TORCH_2_13 = _TORCH_2_15._replace(dtypes=46, dtype_names=_DTYPES_2_8)
_TORCH_2_12 = _TORCH_2_13._replace(
    tensor_sizes=64, tensor_dtype=168, tensor_policy=174, tensor_symbolic=174, comms_kind=4
)
_TORCH_2_11 = _TORCH_2_12._replace(comms_sequence=0, comms_transfer=0)
_TORCH_2_8 = _TORCH_2_11._replace(tag_bool=9, tag_list=13)
_TORCH_2_7 = _TORCH_2_8._replace(dtypes=45, dtype_names=_DTYPES_2_7)
_TORCH_2_6 = _TORCH_2_8._replace(dtypes=44, dtype_names=_DTYPES_2_6)
_TORCH_2_6_OLD_STRINGS = _TORCH_2_6._replace(
    function_bytes=320,
    function_sequence=176,
    function_inputs=184,
    function_forward_thread=280,
    string_bytes=8,
    comms_group=16,
    comms_name=32,
    comms_rank=24,
    comms_world=28,
    comms_first=112,
    comms_stride=116,
    comms_in=40,
    comms_out=48,
    comms_dtype=56,
    comms_in_splits=64,
    comms_out_splits=88,
    comms_ranks=120,
)
_TORCH_2_5 = _TORCH_2_8._replace(dtypes=37, dtype_names=_DTYPES_2_4)
_TORCH_2_5_OLD_STRINGS = _TORCH_2_6_OLD_STRINGS._replace(dtypes=37, dtype_names=_DTYPES_2_4)
_TORCH_2_4 = _TORCH_2_5._replace(
    comms_first=176,
    comms_stride=180,
    comms_out=116,
    comms_dtype=120,
    comms_in_splits=128,
    comms_out_splits=152,
    comms_ranks=184,
)
_TORCH_2_4_OLD_STRINGS = _TORCH_2_5_OLD_STRINGS._replace(
    comms_first=104,
    comms_stride=108,
    comms_out=44,
    comms_dtype=48,
    comms_in_splits=56,
    comms_out_splits=80,
    comms_ranks=112,
)

LAYOUTS: Dict[Tuple[int, int], Tuple[TorchLayout, ...]] = {
    (2, 4): (_TORCH_2_4, _TORCH_2_4_OLD_STRINGS),
    (2, 5): (_TORCH_2_5, _TORCH_2_5_OLD_STRINGS),
    (2, 6): (_TORCH_2_6, _TORCH_2_6_OLD_STRINGS),
    (2, 7): (_TORCH_2_7,),
    (2, 8): (_TORCH_2_8,),
    (2, 9): (_TORCH_2_11,),
    (2, 10): (_TORCH_2_11,),
    (2, 11): (_TORCH_2_11,),
    (2, 12): (_TORCH_2_12,),
    (2, 13): (_TORCH_2_13,),
    (2, 14): (_TORCH_2_15,),
    (2, 15): (_TORCH_2_15,),
}
