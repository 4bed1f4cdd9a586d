"""Keeps the generation loops of a split model in step: same requests, same stops, same weights, or no step at all.

The library's loops meet before each step to exchange whether one of them was asked to stop or to pause, and take new
requests from the first. The two exchanges are replaced here. Before each step, and again after each pause, every rank
says which weights it computes with and which tokens it has made so far; where two differ, no step is made and the loop
ends. So a rank that missed a commit, or its undoing, cannot add its part to a token. New requests travel as typed
messages: the library would pickle them.
"""

import contextlib
import hashlib
import zlib
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch
import torch.distributed as distributed
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState

from modelswap_engine.protocol.errors import Internal

_HARD_STOP: Final = BackgroundThreadStatus.HARD_STOP
_library: Final[Any] = distributed


class _Request(msgspec.Struct, frozen=True, array_like=True):
    """A new request, as the first rank hands it on."""

    request_id: str
    prompt: list[int]
    max_new_tokens: int | None
    eos: list[int]
    streaming: bool
    options: dict[str, int | float]


class _News(msgspec.Struct, frozen=True, array_like=True):
    """What changed since the last step."""

    requests: list[_Request]
    cancelled: list[str]


_decoder = msgspec.msgpack.Decoder(_News)


class Lockstep:
    """The exchanges of one generation loop with its peers.

    Args:
        manager: of the loop, which has not started yet.
        digest: returns the digest of the live weights.
    """

    def __init__(self, manager: Any, *, digest: Callable[[], str]) -> None:
        self._helper = manager.distributed_helper
        self._status = manager.background_thread_status
        self._digest = digest
        self._known = ""
        self._weights = 0
        self._tokens = 0
        self._let_go = 0
        self.leads: bool = self._helper.is_tp_driver
        self._helper.tp_all_reduce_state = self._meet
        self._helper.tp_broadcast_object_from_rank_0 = self._hand_on

    def made(self, output: GenerationOutput) -> None:
        """Take note of a token, or of the end of a request; called by the loop's own thread."""
        text = f"{output.request_id} {len(output.generated_tokens)} {output.generated_tokens[-1:]} {output.status}"
        self._tokens = zlib.crc32(text.encode(), self._tokens)

    def let_go(self) -> None:
        """End a pause that a peer asked for and nobody here holds."""
        with self._status._condition:
            self._let_go += 1
            if self._status._pauses_requested == 0:
                self._status._paused = False
                self._status._condition.notify_all()

    def _meet(self, payload_size: int, stop_status: int, pause_requested: int = 0) -> tuple[int, int, int]:
        """Exchange the states of all loops, and stand still as long as one of them asks for it.

        Raises:
            Internal: the ranks do not compute the same thing.
            RuntimeError: a rank is gone, or did not come in time.
        """
        if stop_status == _HARD_STOP:
            # Only to tell the others; who does not listen is gone.
            with contextlib.suppress(RuntimeError):
                self._exchange(payload_size, stop_status, pause_requested)
            return payload_size, stop_status, 0
        while True:
            before = self._let_go
            payload, stop, pause = self._exchange(payload_size, stop_status, pause_requested)
            if stop == _HARD_STOP or not pause:
                return payload, stop, 0
            self._stand_still(before)
            stop_status, pause_requested = self._status.local_status, self._status.is_pause_requested()

    def _stand_still(self, before: int) -> None:
        """Stand still until the pause ends; ``before`` counts how often such were ended when it was agreed on."""
        with self._status._condition:
            # It may have been ended before this loop has come to stand: nobody would end it a second time.
            if self._status._pauses_requested or self._let_go == before:
                self._status.pause_and_wait()

    def _exchange(self, payload_size: int, stop_status: int, pause_requested: int) -> tuple[int, int, int]:
        mark = self._mark()
        words = torch.tensor([payload_size, stop_status, int(pause_requested), mark, -mark], dtype=torch.int64)
        _library.all_reduce(words, op=_library.ReduceOp.MAX, group=self._helper.cpu_comm_group)
        payload, stop, pause, highest, lowest = words.tolist()
        if highest != -lowest and stop != _HARD_STOP:
            raise Internal(
                f"the ranks of this model are not at the same point; this one computes with {self._digest()}",
                advice="its workers are restarted and load the version again",
            )
        return payload, stop, pause

    def _mark(self) -> int:
        """Return a number that is the same on ranks with the same weights and the same tokens."""
        digest = self._digest()
        if digest != self._known:
            self._known = digest
            self._weights = int.from_bytes(hashlib.blake2b(digest.encode(), digest_size=7).digest())
        return self._weights ^ self._tokens

    def _hand_on(self, news: tuple[list[RequestState], list[str]]) -> tuple[list[RequestState], list[str]]:
        """Return the first rank's new requests and cancellations, on every rank."""
        group, root = self._helper.cpu_comm_group, self._helper.tp_root_global_rank
        sent = bytearray(_encode(news) if self.leads else b"")
        size = torch.tensor([len(sent)], dtype=torch.int64)
        _library.broadcast(size, src=root, group=group)
        if self.leads:
            _library.broadcast(torch.frombuffer(sent, dtype=torch.uint8), src=root, group=group)
            return news
        received = torch.empty(int(size.item()), dtype=torch.uint8)
        _library.broadcast(received, src=root, group=group)
        found = _decoder.decode(received.numpy().data)
        return [_state(request) for request in found.requests], found.cancelled


def _encode(news: tuple[list[RequestState], list[str]]) -> bytes:
    requests = [
        _Request(
            request_id=state.request_id,
            prompt=state.initial_tokens,
            max_new_tokens=state.max_new_tokens,
            eos=sorted(state._eos_token_ids),
            streaming=state.streaming,
            options=state.logit_processor_kwargs,
        )
        for state in news[0]
    ]
    return msgspec.msgpack.encode(_News(requests=requests, cancelled=news[1]))


def _state(request: _Request) -> RequestState:
    return RequestState(
        request_id=request.request_id,
        initial_tokens=request.prompt,
        max_new_tokens=request.max_new_tokens,
        eos_token_id=request.eos,
        streaming=request.streaming,
        logit_processor_kwargs=request.options,
    )
