"""A deadline on which all ranks of a group agree."""

from __future__ import annotations

from abcrown_dist.parallel.group import Group
from abcrown_dist.util.deadline import Deadline


class AgreedDeadline(Deadline):
    """Expired for all ranks as soon as it is for one, at the same step of each.

    Ranks that share weights must take every decision alike: one that stopped alone would leave the
    others waiting in a collective. So every question is one small vote, and all must ask it together.
    """

    shared = True

    def __init__(self, seconds: float, start: float | None, group: Group) -> None:
        super().__init__(seconds, start)
        self.group = group

    def expired(self) -> bool:
        return self.group.any_true(super().expired())

    def among(self, group: Group) -> AgreedDeadline:
        """The same point in time, agreed on by a part of the ranks (one that is alone asks nobody)."""
        return AgreedDeadline(self.seconds, self.start, group)
