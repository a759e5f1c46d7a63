//! DCTCP (RFC 8257): the window shrinks once per round trip by half of the average marked share.

use super::window::{Window, aged};
use super::{Allowance, Controller, Report, Setup, Start};
use crate::link::Nanos;

/// Weight of the newest round trip in the average marked share (RFC 8257, section 3.3).
const GAIN: f64 = 0.0625;
/// First window, in packets (RFC 6928).
const START_PACKETS: f64 = 10.0;

/// The window of one flow.
#[derive(Debug)]
pub struct Dctcp {
    packet_bytes: f64,
    window: Window,
    is_doubling: bool,
    marked: f64,
    /// The round trip being observed ends with a packet sent at or after this time.
    round_end: Nanos,
    bytes: u64,
    marked_bytes: u64,
    /// A loss has had its effect in this round trip.
    has_lost: bool,
}

impl Dctcp {
    /// Creates a flow that has sent nothing.
    #[must_use]
    pub fn new(setup: &Setup) -> Self {
        let packet_bytes = setup.domain.packet_bytes as f64;
        // Twice the product: unlike the others it holds a queue at the bottleneck.
        let mut window = Window::new(setup, 2.0);
        let first = START_PACKETS * packet_bytes;
        window.set(match setup.start {
            Start::Unknown => first,
            Start::Remembered { window_bytes, age } => aged(window_bytes as f64, age).max(first),
            Start::Exactly(window_bytes) => window_bytes as f64,
        });
        Self {
            packet_bytes,
            window,
            is_doubling: setup.start == Start::Unknown,
            marked: 1.0,
            round_end: 0,
            bytes: 0,
            marked_bytes: 0,
            has_lost: false,
        }
    }
}

impl Controller for Dctcp {
    fn allowance(&self) -> Allowance {
        self.window.allowance(2.0)
    }

    fn sent(&mut self, _bytes: u64, _now: Nanos) {}

    fn reported(&mut self, report: &Report, now: Nanos) {
        self.window.measured(report.rtt_least);
        self.bytes += report.bytes;
        self.marked_bytes += report.marked_bytes;
        if report.lost_packets > 0 && !self.has_lost {
            self.has_lost = true;
            self.is_doubling = false;
            self.window.set(self.window.bytes() / 2.0);
        }
        if self.is_doubling && report.marked_bytes == 0 {
            if report.is_limited {
                self.window.set(self.window.bytes() + report.bytes as f64);
            }
        } else if report.is_limited {
            self.is_doubling = false;
            let step = self.packet_bytes * report.bytes as f64 / self.window.bytes();
            self.window.set(self.window.bytes() + step);
        }
        if report.sent_at >= self.round_end && self.bytes > 0 {
            let share = self.marked_bytes as f64 / self.bytes as f64;
            self.marked += GAIN * (share - self.marked);
            if share > 0.0 && !self.has_lost {
                self.is_doubling = false;
                self.window.set(self.window.bytes() * (1.0 - self.marked / 2.0));
            }
            self.round_end = now;
            (self.bytes, self.marked_bytes, self.has_lost) = (0, 0, false);
        }
    }

    fn timed_out(&mut self, _now: Nanos) {
        self.is_doubling = true;
        self.window.set(0.0);
    }
}
