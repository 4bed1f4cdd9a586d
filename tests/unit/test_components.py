"""The two components that take weights in and give them out hold callbacks, no model, and nobody changes them."""

import dataclasses
import inspect

import pytest

from modelswap_engine.weights.export.exporter import WeightExporter
from modelswap_engine.weights.transfer.receiver import WeightReceiver


@pytest.mark.parametrize("component", [WeightReceiver, WeightExporter])
def test_nobody_changes_a_component_from_outside(component: type) -> None:
    made = object.__new__(component)
    for field in dataclasses.fields(component):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, None)
    assert not hasattr(made, "__dict__")
    parameters = list(inspect.signature(component).parameters.values())
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters)
