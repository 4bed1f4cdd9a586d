"""What SGLang 0.5 answers, as far as it is looked at; unknown fields are ignored, missing ones have their defaults."""

import math

import msgspec


class ModelInfo(msgspec.Struct, frozen=True):
    """``GET /model_info``: where the weights came from last, and what they are called."""

    model_path: str = ""
    served_model_name: str = ""
    weight_version: str = ""


class ServerInfo(msgspec.Struct, frozen=True):
    """``GET /server_info``: the arguments of this start; the answer also passes through every scheduler.

    ``random_seed`` is drawn at each start unless somebody fixed it, ``startup_time`` says what took how long.
    """

    version: str = ""
    served_model_name: str = ""
    device: str = ""
    dtype: str = ""
    quantization: str | None = None
    random_seed: int | None = None
    startup_time: msgspec.Raw = msgspec.Raw(b"null")
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    tokenizer_worker_num: int = 1
    disaggregation_mode: str = "null"
    speculative_algorithm: str | None = None
    enable_lora: bool | None = None
    max_loras_per_batch: int = 0
    max_loaded_loras: int | None = None
    max_lora_rank: int | None = None
    disable_cuda_graph: bool = False


class ModelCard(msgspec.Struct, frozen=True):
    """A model that requests can name; one with a ``parent`` is an adapter, and ``root`` its folder."""

    id: str
    root: str = ""
    parent: str | None = None


class ModelCards(msgspec.Struct, frozen=True):
    """All of them."""

    data: list[ModelCard] = []


class Done(msgspec.Struct, frozen=True):
    """What most routes that change something answer, with 200 or 400."""

    success: bool = False
    message: str = ""


class Parallelism(msgspec.Struct, frozen=True):
    """Which part of which model a rank holds."""

    role: str = "target"
    rank: int = 0
    size: int = 1


class RankSums(msgspec.Struct, frozen=True):
    """The checksums of one rank by runtime name; their kind depends on the device."""

    checksums: dict[str, str]
    parallelism_info: list[Parallelism] = []

    @property
    def rank(self) -> int:
        """Its number."""
        return self.parallelism_info[0].rank if self.parallelism_info else 0


class Checked(msgspec.Struct, frozen=True):
    """``/weights_checker``."""

    success: bool = False
    message: str = ""
    ranks: list[RankSums] = []


class Told(msgspec.Struct, frozen=True):
    """The log-probabilities of tokens: each with its token; None where it is not finite, and for the very first."""

    input_token_logprobs: list[tuple[float | None, int, str | None]] = []
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []


class Generated(msgspec.Struct, frozen=True):
    """``POST /generate``, asked for log-probabilities."""

    output_ids: tuple[int, ...] = ()
    meta_info: Told = Told()

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The prompt in tokens."""
        return tuple(token for _, token, _ in self.meta_info.input_token_logprobs)

    @property
    def logprobs(self) -> list[float]:
        """Of each token of the prompt but the first, and of what came after it; NaN for one that is not told."""
        told = [*self.meta_info.input_token_logprobs[1:], *self.meta_info.output_token_logprobs]
        return [math.nan if value is None else value for value, _, _ in told]


class Load(msgspec.Struct, frozen=True):
    """The requests of one scheduler."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0


class Loads(msgspec.Struct, frozen=True):
    """``GET /v1/loads``."""

    loads: list[Load]

    @property
    def requests(self) -> int:
        """How many requests the engine has, running or waiting."""
        return sum(load.num_running_reqs + load.num_waiting_reqs for load in self.loads)
