"""Views as functions, and what editors and help() know of them."""

import ast
import inspect
from pathlib import Path

import kineto_trace as kt
import pytest
from kineto_trace.catalog import view_methods
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.errors import ViewError
from support.trace_files.traces import target, trace

STUB = Path(view_methods.__file__).with_suffix(".pyi")


def test_a_view_is_a_function_whose_arguments_are_its_options() -> None:
    made = trace({"kernel": [{"name": "gemm", "duration": 2_000}]}, target=target(rank=3))
    found = kt.views.kernels(made)
    assert found.rows() == kt.run_view("kernels", made).rows()
    assert found.values("rank") == [3]
    assert kt.views.idle_breakdown(made, consecutive_kernel_delay=50, compat="hta").view == "idle_breakdown"


def test_the_views_are_still_there_by_name() -> None:
    assert kt.views() == dict(sorted(VIEWS.items()))
    assert set(VIEWS) <= set(dir(kt.views))


def test_an_unknown_view_or_option_is_an_error() -> None:
    with pytest.raises(AttributeError, match="no view is called 'kernel'"):
        _ = getattr(kt.views, "kernel")  # noqa: B009 - type checkers know that it is not there
    with pytest.raises(ViewError, match="view kernels has no option speed"):
        getattr(kt.views, "kernels")(trace({}), speed=1)  # noqa: B009


def test_help_shows_options_columns_and_rules() -> None:
    function = kt.views.idle_breakdown
    parameters = inspect.signature(function).parameters
    assert [*list(parameters)[:1], *list(parameters)[-2:]] == ["sources", "compat", "executor"]
    assert parameters["consecutive_kernel_delay"].default == VIEWS["idle_breakdown"].options["consecutive_kernel_delay"]
    assert function.__name__ == "idle_breakdown"
    assert function.__doc__ and "Columns: rank, device, stream, category" in function.__doc__


@pytest.mark.parametrize("name", sorted(VIEWS))
def test_no_option_has_the_name_of_an_argument_that_all_views_have(name: str) -> None:
    assert not {"self", "sources", "compat", "executor"} & set(VIEWS[name].options)


def test_the_stub_has_every_view_with_its_options() -> None:
    (views,) = (node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef))
    methods = {node.name: node for node in views.body if isinstance(node, ast.FunctionDef) and node.name != "__call__"}
    assert set(methods) == set(VIEWS)
    for name, method in methods.items():
        arguments = [argument.arg for argument in method.args.kwonlyargs]
        assert arguments[: len(VIEWS[name].options)] == list(VIEWS[name].options)
        assert ast.get_docstring(method)
