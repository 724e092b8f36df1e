"""The planted causes of programs that use a GPU."""

import importlib
import inspect
import re
import shutil
import sys

import pytest
from rootcause.__main__ import main
from rootcause.causes import Cause
from rootcause.gpu_causes import GPU_CAUSES, GPU_HELD_OUT

ALL = (*GPU_CAUSES, *GPU_HELD_OUT)


@pytest.mark.slow
def test_each_cause_is_planted_in_its_program() -> None:
    pytest.importorskip("torch")
    for cause in ALL:
        source = inspect.getsource(importlib.import_module(f"rootcause.programs.{cause.program}"))
        assert f'"{cause.name}"' in source, cause.name


def test_there_are_at_least_twenty_and_each_has_a_name_of_its_own() -> None:
    names = [cause.name for cause in ALL]
    assert len(set(names)) == len(names) >= 20


def test_patterns_do_not_fit_everything() -> None:
    assert not [cause.name for cause in ALL if re.search(cause.where, "step loop") or re.search(cause.remedy, "wait")]


def test_without_a_gpu_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rootcause", "--gpu"])
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert main() == 2
    assert "this machine has no nvidia-smi" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "listed"), [(["--gpu"], GPU_CAUSES), (["--gpu", "--held-out"], GPU_HELD_OUT)])
def test_held_out_causes_are_a_family_of_their_own(
    options: list[str],
    listed: tuple[Cause, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["rootcause", *options, "--list"])
    assert main() == 0
    assert capsys.readouterr().out.split() == [cause.name for cause in listed]


@pytest.mark.parametrize("other", ["--frameworks", "--afterthoughts", "--ranks"])
def test_families_without_held_out_causes_say_so(
    other: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["rootcause", "--held-out", other])
    with pytest.raises(SystemExit):
        main()
    assert "can be combined with --gpu only" in capsys.readouterr().err
