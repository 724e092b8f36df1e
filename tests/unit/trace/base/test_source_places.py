"""Places in source code as people read them."""

import pytest
from kineto_trace.base.source_places import place_parts, short_place, source_file


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/opt/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", "torch/nn/modules/linear.py"),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", "yaml/__init__.py"),
        ("/usr/lib/python3.12/threading.py", "threading.py"),
        ("/usr/lib64/python3.13t/threading.py", "threading.py"),
        (r"C:\v\Lib\site-packages\torch\nn\functional.py", "torch/nn/functional.py"),
        ("torch/nn/functional.py", "torch/nn/functional.py"),
        ("/home/ada/train.py", "train.py"),
        ("../ada/train.py", "train.py"),
        (r"C:\ada\train.py", "train.py"),
        ("/home/ada/data/__init__.py", "data/__init__.py"),
        ("__init__.py", "__init__.py"),
        ("<string>", "<string>"),
    ],
)
def test_files_of_packages_are_named_from_the_package_on_and_others_by_their_name(path: str, text: str) -> None:
    assert source_file(path) == text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("main (/job/train.py:13)", ("main", "(train.py:13)")),
        ("main (/job/train.py)", ("main", "(train.py)")),
        ("f (<string>:5)", ("f", "(<string>:5)")),
        ("f (/v (1)/lib/python3.12/site-packages/a/b.py:9)", ("f", "(a/b.py:9)")),
        ("/v/lib/python3.12/site-packages/a/b.py(9): C.f", ("a/b.py(9):", "C.f")),
        ("/job/train.py", ("train.py",)),
        ("void gemm<float>(int, float*)", ()),
        ("no stacks: use --with-stack (torch.profiler: with_stack=True)", ()),
        ("all_reduce default_pg", ()),
        ("aten::mm", ()),
        ("", ()),
    ],
)
def test_a_place_has_a_function_and_a_file_and_other_text_has_neither(text: str, parts: tuple[str, ...]) -> None:
    assert place_parts(text) == parts
    assert short_place(text) == (" ".join(parts) or text)
