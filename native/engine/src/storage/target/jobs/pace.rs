//! Decides when a job may continue: by its rate, and by the latency of hosts' commands.

use sealane_proto::link::{NANOS_PER_SECOND, Nanos};

use crate::storage::target::load::HostLoad;

/// Mean duration of commands above which a job holds back: 20 ms, several times that of a busy
/// drive, and about that of an anchored flush.
pub const LATENCY_MAX: Nanos = 20_000_000;
/// How long it then holds back before each piece. So it continues at 1.3 MB/s even if hosts are
/// busy.
pub const HOLD: Nanos = 100_000_000;
/// Shortest time over which a mean is taken.
const WINDOW: Nanos = 10_000_000;

/// Limits bytes to a rate.
#[derive(Debug)]
pub struct Pace {
    bytes_per_second: u64,
    due: Nanos,
}

impl Pace {
    /// Creates a limit in bytes per second; 0: no limit.
    pub fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, due: 0 }
    }

    /// Changes the rate, also for the piece that is waiting.
    pub fn set_rate(&mut self, bytes_per_second: u64) {
        *self = Self::new(bytes_per_second);
    }

    /// When the next piece may begin.
    pub fn due(&self) -> Nanos {
        self.due
    }

    /// Records bytes moved since `began`. Unused time isn't made up for.
    pub fn moved(&mut self, began: Nanos, bytes: u64) {
        if self.bytes_per_second > 0 {
            let cost = u128::from(bytes) * u128::from(NANOS_PER_SECOND);
            let cost = (cost / u128::from(self.bytes_per_second)) as Nanos;
            self.due = self.due.max(began).saturating_add(cost);
        }
    }
}

/// Observes the commands of hosts and decides whether they take too long.
#[derive(Debug)]
pub struct Courtesy {
    at: Nanos,
    load: HostLoad,
}

impl Courtesy {
    /// Starts observing.
    pub fn new(now: Nanos, load: HostLoad) -> Self {
        Self { at: now, load }
    }

    /// Whether commands took longer than [`LATENCY_MAX`] on average since the last decision; None
    /// if too little time has passed.
    pub fn must_hold(&mut self, now: Nanos, load: HostLoad) -> Option<bool> {
        if now < self.at + WINDOW {
            return None;
        }
        let ended = load.ended - self.load.ended;
        let time = load.time - self.load.time;
        *self = Self { at: now, load };
        // Running commands have taken part of the time, too.
        let commands = ended.max(load.running).max(1);
        Some(time / commands > LATENCY_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLISECOND: Nanos = 1_000_000;

    #[test]
    fn bytes_are_limited_to_the_rate_and_idle_time_is_not_made_up_for() {
        let mut pace = Pace::new(1000);
        pace.moved(5 * NANOS_PER_SECOND, 500);
        assert_eq!(pace.due(), 5_500_000_000);
        // Begun late: the lost time isn't made up for.
        pace.moved(9 * NANOS_PER_SECOND, 1000);
        assert_eq!(pace.due(), 10 * NANOS_PER_SECOND);
        pace.set_rate(0);
        pace.moved(9 * NANOS_PER_SECOND, 1 << 40);
        assert_eq!(pace.due(), 0);
    }

    #[test]
    fn holds_back_while_ended_or_running_commands_take_long() {
        let idle = HostLoad::default();
        let mut courtesy = Courtesy::new(0, idle);
        assert_eq!(courtesy.must_hold(MILLISECOND, idle), None);
        assert_eq!(courtesy.must_hold(10 * MILLISECOND, idle), Some(false));
        // Ten commands of 19 ms each.
        let load = HostLoad { ended: 10, time: 190 * MILLISECOND, running: 1 };
        assert_eq!(courtesy.must_hold(200 * MILLISECOND, load), Some(false));
        let load = HostLoad { ended: 20, time: (190 + 210) * MILLISECOND, running: 1 };
        assert_eq!(courtesy.must_hold(400 * MILLISECOND, load), Some(true));
        // Two commands running since then.
        let load = HostLoad { ended: 20, time: load.time + 2 * 50 * MILLISECOND, running: 2 };
        assert_eq!(courtesy.must_hold(450 * MILLISECOND, load), Some(true));
        assert_eq!(courtesy.must_hold(500 * MILLISECOND, load), Some(false));
    }
}
