//! BBR version 1 (draft-cardwell-iccrg-bbr-congestion-control-00): the largest rate of delivery of
//! late and the least round trip decide. It knows neither marks nor losses.

use std::collections::VecDeque;

use sealane_proto::congestion::{Allowance, Controller, Report, Setup};
use sealane_proto::link::{NANOS_PER_SECOND, Nanos};

use super::product;

/// Gain that doubles the rate in a round trip, and its inverse.
const STARTUP: f64 = 2.89;
const DRAIN: f64 = 0.35;
/// Gains of the phases, each of which lasts a round trip.
const CYCLE: [f64; 8] = [1.25, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
/// Products in flight.
const WINDOW_PRODUCTS: f64 = 2.0;
/// Round trips over which the largest rate is kept.
const RATE_ROUNDS: usize = 10;
/// The path is full if the rate grew by less than this …
const GROWTH: f64 = 1.25;
/// … in this many round trips in a row.
const FULL_ROUNDS: u32 = 3;
/// First window in packets, and the least one.
const START_PACKETS: f64 = 10.0;
const LEAST_PACKETS: f64 = 4.0;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Startup,
    Drain,
    Cruise { phase: usize, since: Nanos },
}

#[derive(Debug)]
pub(super) struct Bbr {
    setup: Setup,
    pub(super) state: State,
    in_flight: f64,
    delivered: u64,
    /// Bytes delivered by the time of each acknowledgement, for packets that are on the way.
    history: VecDeque<(Nanos, u64)>,
    /// Largest rates of the last rounds, the newest last.
    rates: VecDeque<f64>,
    round_end: Nanos,
    full_rate: f64,
    full_rounds: u32,
}

impl Bbr {
    pub fn new(setup: &Setup) -> Self {
        Self {
            setup: *setup,
            state: State::Startup,
            in_flight: 0.0,
            delivered: 0,
            history: VecDeque::new(),
            rates: VecDeque::from([0.0]),
            round_end: 0,
            full_rate: 0.0,
            full_rounds: 0,
        }
    }

    fn packet(&self) -> f64 {
        self.setup.domain.packet_bytes as f64
    }

    /// Bytes per second.
    pub fn rate(&self) -> f64 {
        let known = self.rates.iter().copied().fold(0.0, f64::max);
        let start =
            START_PACKETS * self.packet() * NANOS_PER_SECOND as f64 / self.setup.base_rtt as f64;
        if known > 0.0 { known } else { start }
    }

    fn product(&self) -> f64 {
        self.rate() * self.setup.base_rtt as f64 / NANOS_PER_SECOND as f64
    }

    fn gains(&self) -> (f64, f64) {
        match self.state {
            State::Startup => (STARTUP, STARTUP),
            State::Drain => (DRAIN, STARTUP),
            State::Cruise { phase, .. } => (CYCLE[phase], WINDOW_PRODUCTS),
        }
    }

    /// The rate at which what was sent with a packet was delivered.
    fn sample(&mut self, report: &Report, now: Nanos) -> f64 {
        self.delivered += report.bytes;
        while self.history.get(1).is_some_and(|(at, _)| *at <= report.sent_at) {
            self.history.pop_front();
        }
        let before = self.history.front().filter(|(at, _)| *at <= report.sent_at);
        let before = before.map_or(0, |(_, delivered)| *delivered);
        self.history.push_back((now, self.delivered));
        let elapsed = now.saturating_sub(report.sent_at).max(1);
        (self.delivered - before) as f64 * NANOS_PER_SECOND as f64 / elapsed as f64
    }

    fn end_round(&mut self, now: Nanos) {
        self.round_end = now;
        let rate = self.rate();
        self.rates.push_back(0.0);
        if self.rates.len() > RATE_ROUNDS {
            self.rates.pop_front();
        }
        if self.state != State::Startup {
            return;
        }
        if rate >= GROWTH * self.full_rate {
            (self.full_rate, self.full_rounds) = (rate, 0);
        } else {
            self.full_rounds += 1;
            if self.full_rounds >= FULL_ROUNDS {
                self.state = State::Drain;
            }
        }
    }
}

impl Controller for Bbr {
    fn allowance(&self) -> Allowance {
        let (pace, window) = self.gains();
        let line = self.setup.domain.line_bytes_per_second;
        let most = WINDOW_PRODUCTS * product(&self.setup);
        let window = (window * self.product()).min(most).max(LEAST_PACKETS * self.packet());
        Allowance::new(window, pace * self.rate(), line)
    }

    fn sent(&mut self, bytes: u64, _now: Nanos) {
        self.in_flight += bytes as f64;
    }

    fn reported(&mut self, report: &Report, now: Nanos) {
        let lost = report.lost_packets as f64 * self.packet();
        self.in_flight = (self.in_flight - report.bytes as f64 - lost).max(0.0);
        if report.bytes == 0 {
            return;
        }
        let rate = self.sample(report, now);
        if let Some(newest) = self.rates.back_mut() {
            *newest = newest.max(rate);
        }
        if report.sent_at >= self.round_end {
            self.end_round(now);
        }
        match self.state {
            State::Drain if self.in_flight <= self.product() => {
                self.state = State::Cruise { phase: 2, since: now };
            }
            State::Cruise { phase, since } => {
                let is_over = now.saturating_sub(since) >= self.setup.base_rtt;
                let is_drained = CYCLE[phase] < 1.0 && self.in_flight <= self.product();
                if is_over || is_drained {
                    self.state = State::Cruise { phase: (phase + 1) % CYCLE.len(), since: now };
                }
            }
            _ => {}
        }
    }

    fn timed_out(&mut self, _now: Nanos) {}
}
