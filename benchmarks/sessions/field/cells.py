"""Links and messages of the field: what long links do to packets, at three round trips.

Each kind of link has its own round trip. Messages keep their length.
"""

from typing import Final

from benchmarks.sessions.lab.cells import MIB, Condition, Effort, Links

from sealane.planning.model import Loss

RATES: Final = (100_000_000, 70_000_000, 50_000_000, 30_000_000)
LOSSES: Final = (1e-5, 1e-4, 1e-3, 1e-2, 5e-2)
BURSTS: Final = (8.0, 32.0, 128.0)
USUAL: Final = Loss(rate=1e-4)
"""Loss of links that do something else to packets as well."""
CONDITIONS: Final = (
    *(Condition(name=f"{rate:.0e}".replace("e-0", "e-"), loss=Loss(rate=rate)) for rate in LOSSES),
    *(
        Condition(name=f"1e-2, bursts of {burst:g}", loss=Loss(rate=1e-2, burst_packets=burst))
        for burst in BURSTS
    ),
    Condition(name="5 % of ACKs lost", loss=USUAL, loss_backward=5e-2),
    Condition(name="jitter", loss=USUAL, jitter=0.2),
    Condition(name="reordering", loss=USUAL, reorder=1e-2),
    Condition(name="duplication", loss=USUAL, duplicate=1e-2),
    Condition(name="outages", loss=USUAL, outage_round_trips=4.0),
)
ROUND_TRIPS: Final = (0.005, 0.025, 0.1)
LINKS: Final = tuple(
    Links(
        name=f"{round_trip * 1e3:g} ms",
        round_trip=round_trip,
        full_rate=RATES[0],
        rates=RATES,
        lanes=1,
        sizes=(MIB // 16, MIB, 8 * MIB, 64 * MIB),
        conditions=CONDITIONS,
        seconds_warm=(25.0, 25.0, 25.0, 40.0),
        seconds_cold=8.0,
    )
    for round_trip in ROUND_TRIPS
)
FULL: Final = Effort(count=1002, share=1.0)
QUICK: Final = Effort(count=100, share=0.15)
QUICK_CONDITIONS: Final = ("1e-3", "1e-2", "5 % of ACKs lost")
QUICK_BYTES_MAX: Final = MIB
