"""What an operator of the embedded engine can set; checked here, used on both sides of the worker's socket."""

from enum import StrEnum

import msgspec


class Device(StrEnum):
    """Where the model runs; ``AUTO`` is a GPU where torch sees one, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class CommitMethod(StrEnum):
    """How staged tensors become live.

    ``AUTO`` points the parameters to them, unless captured graphs or compiled code hold the addresses of the live
    ones; then it copies them over.
    """

    AUTO = "auto"
    POINTER = "pointer"
    COPY = "copy"


class EmbeddedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and bounds of the embedded engine.

    The KV cache holds ``num_blocks * page_size`` tokens over all requests, and is allocated once, at load.

    Attributes:
        page_size: tokens per KV page; prefixes are shared in whole pages.
        num_blocks: KV pages of the whole model.
        max_batch_tokens: tokens computed in one step at most; longer prompts are split.
        max_requests: requests in one step at most.
        device: where model, KV cache and staged tensors lie; each rank has a GPU of its own.
        torch_threads: threads of one forward step; 0 means one per usable core.
        tensor_parallel: processes that hold one model together, each a slice of it.
        data_parallel: replicas of the model, each with its own processes and KV cache.
        commit_method: how staged tensors become live.
        stage_threads: threads that read, hash and re-hash beside decoding; 0 means one per usable core.
        lora_slots: LoRA adapters that one batch can use; 0 means that adapters are not served.
        lora_max_rank: highest rank of an adapter.
        trial_tokens: length of the prompt that a version is tried with before it can answer; 0 only for measuring.
        stage_share: of a core that each thread of background staging may use while requests run; 1 is no bound.
        stage_bytes_per_second: upper bound of the rate of background staging; 0 means none.
        stage_niceness: how much staging gives way to decoding, 0 to 19.
        weight_loaders: import paths (``package.module:function``) of the custom weight loaders that may be used.
        pause_lease_seconds: an abandoned pause undoes itself after this time.
        start_timeout: seconds a worker process may take to come up.
        load_timeout: seconds a full load may take.
        stage_timeout: seconds one staging may take.
        call_timeout: seconds any other call may take; a worker that takes longer is lost.
        peer_timeout: seconds one rank of a split model waits for another at a step; then the model is started anew.
        adapter_timeout: seconds that loading an adapter may take.
        heartbeat_seconds: how often each worker is asked whether it still answers.
        hash_timeout: seconds a re-hash of the live tensors may take.
    """

    page_size: int = 32
    num_blocks: int = 512
    max_batch_tokens: int = 512
    max_requests: int = 64
    device: Device = Device.AUTO
    torch_threads: int = 0
    tensor_parallel: int = 1
    data_parallel: int = 1
    commit_method: CommitMethod = CommitMethod.AUTO
    stage_threads: int = 0
    trial_tokens: int = 2
    lora_slots: int = 0
    lora_max_rank: int = 64
    stage_share: float = 0.1
    stage_bytes_per_second: int = 0
    stage_niceness: int = 10
    weight_loaders: tuple[str, ...] = ()
    pause_lease_seconds: float = 60.0
    start_timeout: float = 180.0
    load_timeout: float = 1800.0
    stage_timeout: float = 1800.0
    call_timeout: float = 60.0
    peer_timeout: float = 60.0
    adapter_timeout: float = 300.0
    hash_timeout: float = 900.0
    heartbeat_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name in (
            "page_size", "num_blocks", "max_batch_tokens", "max_requests", "tensor_parallel", "data_parallel",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name, least, most in (("lora_slots", 0, 1024), ("lora_max_rank", 1, 4096)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)}: must be between {least} and {most}")
        if self.lora_slots and self.tensor_parallel > 1:
            raise ValueError(
                f"lora_slots={self.lora_slots}, tensor_parallel={self.tensor_parallel}: adapters need a whole model"
            )
        if self.page_size < 4:
            raise ValueError(f"page_size={self.page_size}: the KV cache needs pages of at least 4 tokens")
        if not 0 <= self.stage_niceness <= 19:
            raise ValueError(f"stage_niceness={self.stage_niceness}: must be between 0 and 19")
        if not 0 < self.stage_share <= 1:
            raise ValueError(f"stage_share={self.stage_share}: must be above 0, and 1 at most")

    @property
    def ranks(self) -> int:
        """Worker processes."""
        return self.tensor_parallel * self.data_parallel

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache can hold."""
        return self.page_size * self.num_blocks
