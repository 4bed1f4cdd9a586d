"""Options that commands take as a group: a parameter that is a dataclass stands, in its place, for the fields of it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import wraps
from typing import Any


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer, which knows no groups; parameters and fields are keyword-only."""
    signature = inspect.signature(command)
    made: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        group = parameter.annotation
        if isinstance(group, type) and is_dataclass(group):
            made[parameter.name] = group
            parameters += inspect.signature(group).parameters.values()
        else:
            parameters.append(parameter)

    @wraps(command)
    def ungrouped(**values: Any) -> None:
        for name, group in made.items():
            values[name] = group(**{field: values.pop(field) for field in inspect.signature(group).parameters})
        command(**values)

    ungrouped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return ungrouped


def flattened(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the fields of each group in its place."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        found |= vars(value) if is_dataclass(value) else {name: value}
    return found
