"""In which precision a kernel computes, told by its name or by the types of its operator's inputs.

Theory of operation
    A name can have several types: those of the operands, and wider ones in which products are added up or results are
    written. The narrowest one counts, as it decides how fast the GPU can be. Names of cuBLAS say it in a letter
    (nvjet_t: bf16; s1688: tf32), and so do those of rocBLAS and hipBLASLt after the indices of the product
    (Cijk_Alik_Bljk_HHS: fp16); those of templates in the type's name (c10::BFloat16), or as compilers shorten it
    (DF16b: bf16).
"""

import re

BITS = {"fp4": 4, "fp8": 8, "int8": 8, "fp16": 16, "bf16": 16, "tf32": 32, "fp32": 32, "fp64": 64}  # as stored
PRECISIONS = tuple(BITS)  # by number
UNKNOWN = -1  # no number

_TENSILE = r"^Cijk_[A-Z][a-z]+_[A-Z][a-z]+_"  # rocBLAS's and hipBLASLt's names: then come the types
_BY_NAME: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (precision, re.compile(pattern))
    for precision, pattern in (  # the narrowest first
        ("fp4", r"e2m1|nvf4|mxf4|fp4"),
        ("fp8", r"e4m3|e5m2|fp8|[Ff]loat8|nvjet_\w*q|" + _TENSILE + r"[FB]8"),
        ("int8", r"int8|i8i8|s8s8|imma(?![a-z])|(?<![a-z\d])i\d+gemm|" + _TENSILE + r"(?:4x)?[iI]8"),
        ("bf16", r"bf16|[Bb][Ff]loat16|DF16b|nvjet_\w*?t[a-z]{2}_|" + _TENSILE + r"B"),
        (
            "fp16",
            r"fp16|(?<![a-z\d])f16|[Hh]alf(?![a-z])|(?<![a-z\d])h\d{3,5}(?!\d)|hgemm|DF16_|_Float16"
            r"|nvjet_\w*?h[a-z]{2}_|" + _TENSILE + r"H",
        ),
        ("tf32", r"tf32|s1688(?!\d)|nvjet_\w*?s[a-z]{2}_"),
        (
            "fp32",
            r"(?<![a-z])float(?!\d)|(?<![a-z])f32|fp32|sgemm|scudnn|[fs]fma|gemm_float|" + _TENSILE + r"S",
        ),
        ("fp64", r"double|(?<![a-z])f64|fp64|dgemm|d884|nvjet_\w*?d[a-z]{2}_|" + _TENSILE + r"D"),
    )
)
_BY_TYPE = {
    "float8": "fp8",
    "signed char": "int8",
    "bfloat16": "bf16",
    "half": "fp16",
    "float": "fp32",
    "double": "fp64",
}  # the narrowest first


def precision_of_name(name: str) -> str | None:
    """The precision, a key of BITS; None: the name does not tell."""
    return next((precision for precision, pattern in _BY_NAME if pattern.search(name)), None)


def precision_number(precision: str | None) -> int:
    """The place in PRECISIONS, or UNKNOWN."""
    return UNKNOWN if precision is None else PRECISIONS.index(precision)


def precision_name(number: int) -> str | None:
    """The precision with this number; None for UNKNOWN."""
    return None if number == UNKNOWN else PRECISIONS[number]


def precision_of_types(types: object) -> str | None:
    """The narrowest of an operator's input types, as Kineto names them ("c10::BFloat16"); None: none is known."""
    if not isinstance(types, list):
        return None
    texts = [text.lower() for text in types if isinstance(text, str)]
    return next((found for word, found in _BY_TYPE.items() if any(_is(word, text) for text in texts)), None)


def _is(word: str, text: str) -> bool:
    """Whether the type is of this kind: float8 has variants behind it, and "long int" or "float" are whole names."""
    name = text.removeprefix("c10::").removeprefix("at::")
    return name.startswith(word) if word == "float8" else name == word
