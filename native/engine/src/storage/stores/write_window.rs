//! Limits how many announced writes in place a channel has at the device while others wait to be
//! announced.
//!
//! An announcement is one small write, and every write that it announces waits for it. Behind many
//! large writes it waits long, and if those complete first, the device is idle. So the channel
//! holds writes back on devices where they slow announcements down (decision 50). On devices that
//! execute many in parallel, it sends all of them.

use sealane_proto::link::Nanos;

/// Smallest window: enough to keep a drive busy.
const WRITES_MIN: usize = 8;
/// Largest window.
const WRITES_MAX: usize = 1024;
/// An announcement is slow if it takes longer than this many times the fastest.
const SLOW: Nanos = 2;
/// The fastest time grows by this fraction with each announcement, because devices change. That is
/// slow enough: after a flush, an announcement finds the device idle and sets it again.
const FORGOTTEN: Nanos = 1 << 16;

#[derive(Debug)]
pub(super) struct WriteWindow {
    size: usize,
    /// About the duration of the fastest announcement; `None` before the first.
    least: Option<Nanos>,
}

impl Default for WriteWindow {
    fn default() -> Self {
        Self { size: WRITES_MIN, least: None }
    }
}

impl WriteWindow {
    /// Most writes at the device.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Adapts the window to an announcement that took `took` at the device.
    pub fn announced(&mut self, took: Nanos) {
        let known =
            self.least.map_or(took, |least| least.saturating_add(least.div_ceil(FORGOTTEN)));
        let least = took.min(known);
        self.least = Some(least);
        self.size = if took > least.saturating_mul(SLOW) {
            (self.size / 2).max(WRITES_MIN)
        } else {
            (self.size + 1).min(WRITES_MAX)
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The window after announcements that take `took(size)` each.
    fn after(announcements: usize, took: impl Fn(usize) -> Nanos) -> usize {
        let mut window = WriteWindow::default();
        for _ in 0..announcements {
            let took = took(window.size());
            window.announced(took);
        }
        window.size()
    }

    #[test]
    fn it_stays_small_where_announcements_wait_behind_writes() {
        let mut window = WriteWindow::default();
        for announcement in 0..100_000 {
            // A drive that completes a write every 7 µs, and none within 15 µs; with occasional
            // flushes.
            let writes = if announcement % 1000 == 0 { 0 } else { window.size() };
            window.announced(15_000 + 7_000 * writes as Nanos);
            assert!(window.size() <= WRITES_MIN + 1);
        }
    }

    #[test]
    fn it_grows_up_to_its_bound_where_they_do_not() {
        assert_eq!(after(100, |_| 1_000_000), WRITES_MIN + 100);
        assert_eq!(after(10_000, |_| 1_000_000), WRITES_MAX);
    }

    #[test]
    fn a_device_that_became_slower_is_known_after_a_while() {
        let mut window = WriteWindow::default();
        window.announced(10_000);
        for _ in 0..1 << 18 {
            window.announced(100_000);
        }
        assert_eq!(window.size(), WRITES_MAX);
    }

    #[test]
    fn extreme_durations_are_accepted() {
        let mut window = WriteWindow::default();
        for took in [0, Nanos::MAX, 0, Nanos::MAX] {
            window.announced(took);
        }
        assert_eq!(window.size(), WRITES_MIN);
    }
}
