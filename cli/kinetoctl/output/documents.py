"""Plain values as JSON or YAML on stdout."""

import json
from typing import Any

import click
from kineto_protos.plain import plain as plain


def emit(value: Any, output: str) -> None:
    """Print a JSON value on stdout. output: "json" or "yaml"."""
    if output == "json":
        click.echo(json.dumps(value, indent=2, ensure_ascii=False))
    else:
        import yaml  # 10 ms that no other form needs

        click.echo(yaml.safe_dump(value, sort_keys=False, allow_unicode=True), nl=False)
