"""What several ranks cannot do is refused with its reason, before anything is started."""

import pytest

from modelswap_engine.backends.embedded.backend import EmbeddedBackend
from modelswap_engine.backends.embedded.settings import EmbeddedSettings
from modelswap_engine.protocol.policy import TrafficMode


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [({"tensor_parallel": 2}, "in different orders"), ({"data_parallel": 2}, "replica that is restarted meanwhile")],
)
def test_overlap_on_several_ranks(ranks: dict[str, int], reason: str) -> None:
    found = EmbeddedBackend(EmbeddedSettings(**ranks)).capabilities()
    assert set(found.refused_modes) == {TrafficMode.OVERLAP}
    assert reason in found.refused_modes[TrafficMode.OVERLAP]
    assert set(found.traffic_modes) == set(TrafficMode) - {TrafficMode.OVERLAP}


def test_one_rank_has_every_mode() -> None:
    found = EmbeddedBackend(EmbeddedSettings()).capabilities()
    assert (found.refused_modes, set(found.traffic_modes)) == ({}, set(TrafficMode))


def test_adapters_on_a_split_model() -> None:
    with pytest.raises(ValueError, match="lora_slots=2, tensor_parallel=2: adapters need a whole model"):
        EmbeddedSettings(tensor_parallel=2, lora_slots=2)
    assert EmbeddedBackend(EmbeddedSettings(tensor_parallel=2)).capabilities().max_loras == 0
    assert EmbeddedBackend(EmbeddedSettings(data_parallel=2, lora_slots=2)).capabilities().max_loras == 2
