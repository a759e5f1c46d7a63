"""Has plans kept for sessions: which loss they begin with, and a plan before the first one.

Without numpy and the model, which a fabric without sessions does not load.
"""

import asyncio
import functools
import importlib
from typing import Final

from sealane.daemon.fabric.known_paths import PathLoss, PathLosses
from sealane.daemon.fabric.planning_budget import PlanningBudget
from sealane.daemon.fabric.session import Session
from sealane.daemon.fabric.settings import FabricSettings
from sealane.planning.first_plan import UNKNOWN_LOSS, first_rows

FAR_SECONDS: Final = 1e-3
"""On paths with a shorter round trip a repair costs no more than a late thread does."""


class SessionPlans:
    """Keeps the plans of a fabric's sessions, and what they measure, for the next ones."""

    def __init__(self, settings: FabricSettings) -> None:
        self.losses = PathLosses()
        self._budget = PlanningBudget()
        self._settings = settings

    def begin(self, session: Session) -> None:
        """Give messages of a session that has no round trip yet parity, unless `keep` would not."""
        if self._settings.plan_objective == "auto":
            self._install_first(session, FAR_SECONDS)

    async def keep(self, session: Session) -> None:
        """Keep the plan of an established session current until it is closed.

        With the objective `auto` and a long path, messages sent within a round trip get parity
        until there is a plan (before a path has answered, those of a short round trip); where no
        session has measured the path, until enough packets have arrived.
        """
        identity = session.identity
        path = session.path_key()
        measured = self.losses.get(path)
        round_trip_seconds = session.statistics()["srtt_nanos"] / 1e9
        is_auto = self._settings.plan_objective == "auto"
        is_careful = is_auto and round_trip_seconds >= FAR_SECONDS
        if is_careful:
            self._install_first(session, round_trip_seconds)
        plans = await asyncio.to_thread(importlib.import_module, "sealane.daemon.fabric.plans")
        await plans.keep_planned(
            session,
            rate_bits_per_second=identity.rate_bits_per_second,
            unit_bytes=identity.unit_bytes,
            assumed=measured or PathLoss(rate=self._settings.assumed_loss),
            caution=UNKNOWN_LOSS if is_careful and measured is None else 0.0,
            # A message lies in the session's region.
            message_bytes_max=session.job.regions[identity.name].size_bytes,
            objective=self._settings.plan_objective,
            waits_for_data=is_careful,
            # Paths to one host may share all of their way.
            path_count=len(path.hosts),
            budget=self._budget,
            measured=functools.partial(self.losses.note, path),
        )

    def _install_first(self, session: Session, round_trip_seconds: float) -> None:
        session.install_plan(
            first_rows(
                rate_bits_per_second=session.identity.rate_bits_per_second,
                round_trip_seconds=round_trip_seconds,
                unit_bytes=session.identity.unit_bytes,
            )
        )
