"""What can befall a slot in the random lives of its tests, whatever is looked at in them."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.support.sim_pod import SimPod
from tests.support.slot_world import World

PICK = st.integers(0, 5)


class SlotFate(RuleBasedStateMachine):
    """Rules that every such machine has; it makes its ``world`` itself."""

    world: World

    def _pod(self, pick: int) -> SimPod:
        return self.world.pods[pick % len(self.world.pods)]

    @rule()
    def suspend_or_not(self) -> None:
        self.world.edit(suspend=not self.world.spec.suspend)

    @rule()
    def kill_operator(self) -> None:
        self.world.kill_operator()

    @precondition(lambda self: self.world.pods)
    @rule(pick=PICK)
    def restart_pod(self, pick: int) -> None:
        self._pod(pick).restart()

    @precondition(lambda self: self.world.pods)
    @rule(pick=PICK)
    def cut_off_or_not(self, pick: int) -> None:
        pod = self._pod(pick)
        pod.reachable = not pod.reachable

    @precondition(lambda self: self.world.pods)
    @rule(pick=PICK)
    def lose_pod(self, pick: int) -> None:
        self.world.pods.remove(self._pod(pick))
