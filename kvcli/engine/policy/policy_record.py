"""Record of the eviction policy of one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.engine.policy.policy import CompressionPoint, Policy, PolicyRequirements
from kvcli.kv.companion import Companion

if TYPE_CHECKING:
    from kvcli.engine.forward_request import Passes
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.sequence.stored_kv import StoredKV
    from kvcli.kv.snapshot import SnapshotReader, State


class PolicyRecord(Companion):
    """The policy of a sequence, with its requirements and its state."""

    def __init__(self, lm: LM, policy: Policy | None, stored_kv: StoredKV) -> None:
        self.policy, self._stored_kv = policy, stored_kv
        self.wants = policy.requirements(lm) if policy is not None else PolicyRequirements()
        self.state = self.wants.policy_state()

    def rewind(self, n: int, of: int) -> None:
        """Begin the state anew if the policy chose by tokens that go, even if each slot is still stored."""
        if not n or (n < of and not self._stored_kv.is_whole):
            self.state = self.wants.policy_state()

    def compress(self, point: CompressionPoint) -> Passes[None]:
        """Ask the policy which slots to keep."""
        if self.policy is not None:
            point.masks = yield from point.ask(self.policy)

    def snapshot(self) -> State:
        """Return the policy's state."""
        return {"policy_state": self.state.snapshot() if self.state is not None else {}}

    def restore(self, given: SnapshotReader) -> None:
        """Restore a snapshot. Raises SnapshotMismatch."""
        mine = given.part("policy_state")
        if self.state is not None:
            self.state.restore(mine)
