"""How a start of SGLang is told from another one where no launcher names them."""

from modelswap_engine.backends.sglang.answers import Checked, ModelInfo, RankSums, ServerInfo
from modelswap_engine.backends.sglang.client import SglangClient
from modelswap_engine.backends.sglang.control import SglangControl
from modelswap_engine.backends.sglang.words import ACTION, ANSWER


class Engine(SglangClient):
    """One that runs on, and whose half of ours calls the weights by another name when it is told to."""

    def __init__(self) -> None:
        self.away = False
        self.label = "old"

    async def start(self) -> None:
        return None

    async def server_info(self, *, seconds: float) -> ServerInfo:
        return ServerInfo(version="0.5.23", random_seed=7)

    async def model_info(self, *, seconds: float) -> ModelInfo:
        return ModelInfo(weight_version=self.label)

    async def check(self, action: str, *, seconds: float) -> Checked:
        self.label = action.removeprefix(ACTION) or self.label
        return Checked(success=True, ranks=[RankSums(checksums={ANSWER: "done"})])


async def test_a_name_that_was_given_within_the_engine_is_no_restart() -> None:
    engine = Engine()
    control = SglangControl(engine)
    first = (await control.facts(seconds=1)).boot_id
    await control.call_all("new", seconds=1)
    assert (await control.facts(seconds=1)).boot_id == first

    engine.label = "old"  # as it was started
    assert (await control.facts(seconds=1)).boot_id != first
