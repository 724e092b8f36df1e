"""Chains of names, and how long they may be."""

import numpy as np
from kineto_trace.base.array_types import NOTHING
from kineto_trace.structure.module_calls import ELIDED, MOST_CHAINS_BYTES, NAME_BYTES, name_chains


def test_a_chain_has_all_names_from_the_outermost_one_on() -> None:
    chains = name_chains(np.array([NOTHING, 0, 1, 0, NOTHING]), ["a", "b", "c", "d", "e"])
    assert chains == [["a"], ["a", "b"], ["a", "b", "c"], ["a", "d"], ["e"]]
    assert name_chains(np.empty(0, np.int64), []) == []


def test_chains_of_very_deep_calls_keep_their_inner_names_and_take_bounded_memory() -> None:
    count = 50_000
    chains = name_chains(np.arange(-1, count - 1), [f"call {number}" for number in range(count)])
    assert chains[-1][0] == ELIDED and chains[-1][-2:] == [f"call {count - 2}", f"call {count - 1}"]
    assert sum(map(len, chains)) * NAME_BYTES <= MOST_CHAINS_BYTES


def test_one_name_is_never_left_out() -> None:
    name = "n" * (MOST_CHAINS_BYTES // 2)
    assert name_chains(np.array([NOTHING, 0, 1]), [name, name, name]) == [[name], [ELIDED, name], [ELIDED, name]]
