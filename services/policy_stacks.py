"""Which serving policies have a stack: copies of their parameters that decode together, bounded in bytes.

A stack is made for the same policies in the same versions when they come up a second time, since copying costs about
what one decision of theirs does; ever changing company copies nothing. What a stack is and when it is faster is
`kernels.action_modules.stacking`'s.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from configs.errors import JoyNexusError
from kernels.action_modules import ActionModule, stacking

if TYPE_CHECKING:
    from services.serving import ServingPolicy

logger = logging.getLogger(__name__)

_REMEMBERED = 256
Company: TypeAlias = "tuple[weakref.ref[ServingPolicy], ...]"  # weak: a stack keeps no version in service


class PolicyStacks:
    """Stacks in use, the least recently used first to go.

    Args:
        max_bytes: of all stacks together; 0: there are none.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()  # forwards come from one thread, loads, closings and questions from another
        self._turn = 0
        self._stacks: OrderedDict[Company, tuple[ActionModule, int]] = OrderedDict()  # {…: (stack, turn of last use)}
        self._too_large: set[str] = set()  # architectures of which the log has said so
        self._seen: OrderedDict[Company, int] = OrderedDict()  # {without a stack: turn when it last came up}

    @property
    def num_bytes(self) -> int:
        """Of all stacks."""
        with self._lock:
            return self._bytes()

    def find(self, policies: Sequence[ServingPolicy]) -> ActionModule | None:
        """The stack of these policies in this order; None where they have none (yet) and decode one by one.

        Called by forwards, one at a time.

        Args:
            policies: of one architecture, at least two.
        """
        with self._lock:
            self._turn += 1
            self._forget_unserved()
            company = tuple(weakref.ref(policy) for policy in policies)
            if company in self._stacks:
                found = self._stacks[company][0]
                self._stacks[company] = (found, self._turn)
                self._stacks.move_to_end(company)
                return found
            before = self._seen.pop(company, None)
            self._seen[company] = self._turn
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
            modules = [policy.module for policy in policies]
            if before is None:
                return None
            wanted = stacking.stacked_bytes(modules)
            if not self._make_room(wanted, before):
                if wanted > self._max_bytes and policies[0].architecture not in self._too_large:
                    self._too_large.add(policies[0].architecture)
                    logger.warning(
                        "max_stack_bytes: got %d; possible: at least %d for %d policies of kind %r to decode together; "
                        "raise it, or they decode one after another",
                        self._max_bytes,
                        wanted,
                        len(policies),
                        modules[0].spec.kind,
                    )
                return None
        try:
            made = stacking.stack(modules)  # takes a while: not under the lock, and only forwards make one
        except (RuntimeError, JoyNexusError):  # torch's, of a device without room for it; what does not fit together
            logger.warning("no stack of %d policies", len(policies), exc_info=True)
            return None
        with self._lock:
            del self._seen[company]
            self._stacks[company] = (made, self._turn)
        return made

    def forget_unserved(self) -> None:
        """Give the memory of stacks back of which a version is no longer served."""
        with self._lock:
            self._forget_unserved()

    def _forget_unserved(self) -> None:
        for known in (self._stacks, self._seen):
            for company in [c for c in known if any(policy() is None for policy in c)]:
                del known[company]

    def _make_room(self, wanted: int, since: int) -> bool:
        """Whether `wanted` bytes are free now; stacks used after turn `since` stay, so that two do not take turns."""
        unused = {company: stack.num_bytes for company, (stack, used) in self._stacks.items() if used < since}
        free = self._max_bytes - self._bytes()
        if wanted > free + sum(unused.values()):
            return False
        for company, size in unused.items():
            if free >= wanted:
                break
            del self._stacks[company]
            free += size
        return True

    def _bytes(self) -> int:
        return sum(stack.num_bytes for stack, _ in self._stacks.values())
