//! How many announced writes in place a channel has at the device while others wait to be announced.
//!
//! An announcement is one small write, and all that it announces waits for it. Behind many large ones
//! it waits longest, and the device has nothing to do when they have ended before it. So the channel
//! keeps them back where they make announcements slow (decision 50). Where they don't, because the
//! device does many at once, all of them go.

use sealane_proto::link::Nanos;

/// Always allowed: what keeps a drive busy.
const WRITES_MIN: usize = 8;
/// No channel has more.
const WRITES_MAX: usize = 1024;
/// An announcement is slow if it takes so many times as long as the fastest did.
const SLOW: Nanos = 2;
/// The fastest is forgotten by this part with each one: a device changes. Much slower than flushes,
/// behind which an announcement finds the device idle, tell it anew.
const FORGOTTEN: Nanos = 1 << 16;

/// The window.
#[derive(Debug)]
pub(super) struct WriteWindow {
    size: usize,
    /// About how long the fastest announcement took; None: there was none.
    least: Option<Nanos>,
}

impl Default for WriteWindow {
    fn default() -> Self {
        Self { size: WRITES_MIN, least: None }
    }
}

impl WriteWindow {
    /// Writes that may be at the device.
    pub fn size(&self) -> usize {
        self.size
    }

    /// An announcement took so long at the device.
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
            // A drive that ends a write each 7 µs, and none before 15 µs; now and then a flush.
            let writes = if announcement % 1000 == 0 { 0 } else { window.size() };
            window.announced(15_000 + 7_000 * writes as Nanos);
            assert!(window.size() <= WRITES_MIN + 1);
        }
    }

    #[test]
    fn it_opens_where_they_do_not_and_never_beyond_its_bound() {
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
    fn times_of_nothing_and_of_ever_are_taken() {
        let mut window = WriteWindow::default();
        for took in [0, Nanos::MAX, 0, Nanos::MAX] {
            window.announced(took);
        }
        assert_eq!(window.size(), WRITES_MIN);
    }
}
