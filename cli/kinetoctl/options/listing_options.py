"""The options of commands that list: the order, and a list that is kept up to date."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from kinetoctl.base.value_types import DURATION

F = TypeVar("F", bound=Callable[..., Any])
LEAST_INTERVAL_NS = 500_000_000
MOST_INTERVAL_NS = 3600 * 10**9


def in_bounds(_ctx: click.Context, param: click.Parameter, value: int) -> int:
    """Click's hook: an interval between two looks."""
    if not LEAST_INTERVAL_NS <= value <= MOST_INTERVAL_NS:
        raise click.BadParameter("must be between 500ms and 1h", param=param)
    return value


def interval_option(default: str, meaning: str) -> Callable[[F], F]:
    """Adds --interval."""
    return click.option(
        "--interval", type=DURATION, default=default, show_default=True, callback=in_bounds, help=meaning
    )


def listing_options(orders: Iterable[str], usual: str) -> Callable[[F], F]:
    """Adds --sort, --reverse, --watch and --interval. usual: the order without --sort, for people."""

    def added(function: F) -> F:
        for option in reversed(
            (
                click.option(
                    "--sort", "order", type=click.Choice(tuple(orders)), help=f"Sort order.  [default: {usual}]"
                ),
                click.option("--reverse", is_flag=True, help="Reverse the order."),
                click.option(
                    "--watch",
                    "-w",
                    "watches",
                    is_flag=True,
                    help="Keep the list up to date until Ctrl-C; in a pipe, print a line for each change.",
                ),
                interval_option("2s", "Time between two looks with --watch."),
            )
        ):
            function = option(function)
        return function

    return added
