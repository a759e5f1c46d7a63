//! How a flow chooses the paths of its packets, by the entropy that switches hash.

use rand_chacha::ChaCha8Rng;
use rand_core::Rng;
use sealane_proto::link::Nanos;

/// Entropies from which sprayed packets draw.
const SPRAY_ENTROPIES: u64 = 256;
/// Subflows of Uno, one for each packet of a block of its code …
const SUBFLOWS: usize = 10;
/// … and the entropies from which they draw.
const SUBFLOW_ENTROPIES: u64 = 250;
/// PLB: above this marked share, in per cent, a round trip counts as congested …
const PLB_MARKED_PERCENT: u64 = 25;
/// … and after more than this many of them the path is changed.
const PLB_ROUNDS: u32 = 1;

/// A way to choose paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Balance {
    /// One path for each flow: equal-cost multipath.
    Ecmp,
    /// Another path for each packet.
    Spray,
    /// Subflows in turn; silent ones get another path after a loss (UnoLB).
    Subflows,
    /// One path, changed when it is congested or loses packets (Qureshi et al., "PLB", SIGCOMM
    /// 2022).
    Plb,
}

impl Balance {
    /// All of them by name.
    pub const ALL: [(&str, Self); 4] = [
        ("ecmp", Self::Ecmp),
        ("spray", Self::Spray),
        ("subflows", Self::Subflows),
        ("plb", Self::Plb),
    ];
}

#[derive(Debug, Clone, Copy, Default)]
struct Subflow {
    entropy: u32,
    heard_at: Nanos,
    changed_at: Nanos,
}

/// The paths of one flow.
#[derive(Debug)]
pub(super) struct Paths {
    kind: Balance,
    subflows: Vec<Subflow>,
    last: usize,
    base_rtt: Nanos,
    changed_at: Nanos,
    round_end: Nanos,
    packets: u64,
    marked: u64,
    congested_rounds: u32,
}

impl Paths {
    pub fn new(kind: Balance, base_rtt: Nanos, random: &mut ChaCha8Rng) -> Self {
        let count = if kind == Balance::Subflows { SUBFLOWS } else { 1 };
        let subflow =
            |_| Subflow { entropy: draw(random, SUBFLOW_ENTROPIES), ..Subflow::default() };
        Self {
            kind,
            subflows: (0..count).map(subflow).collect(),
            last: count - 1,
            base_rtt,
            changed_at: 0,
            round_end: 0,
            packets: 0,
            marked: 0,
            congested_rounds: 0,
        }
    }

    /// The next packet's subflow and entropy.
    pub fn choose(&mut self, random: &mut ChaCha8Rng) -> (u8, u32) {
        if self.kind == Balance::Spray {
            return (0, draw(random, SPRAY_ENTROPIES));
        }
        self.last = (self.last + 1) % self.subflows.len();
        (self.last as u8, self.subflows[self.last].entropy)
    }

    /// Processes the acknowledgement of a packet.
    pub fn acked(
        &mut self,
        subflow: u8,
        (sent_at, is_marked): (Nanos, bool),
        random: &mut ChaCha8Rng,
        now: Nanos,
    ) {
        if let Some(subflow) = self.subflows.get_mut(usize::from(subflow)) {
            subflow.heard_at = now;
        }
        if self.kind != Balance::Plb {
            return;
        }
        self.packets += 1;
        self.marked += u64::from(is_marked);
        if sent_at < self.round_end {
            return;
        }
        let is_congested = self.marked * 100 > self.packets * PLB_MARKED_PERCENT;
        self.congested_rounds = if is_congested { self.congested_rounds + 1 } else { 0 };
        if self.congested_rounds > PLB_ROUNDS {
            self.redraw(random, now);
        }
        (self.packets, self.marked, self.round_end) = (0, 0, now);
    }

    /// Processes that a packet timed out, or that the receiver asked for a block.
    pub fn lost(&mut self, timeout: Nanos, random: &mut ChaCha8Rng, now: Nanos) {
        match self.kind {
            Balance::Ecmp | Balance::Spray => {}
            Balance::Plb => {
                if now.saturating_sub(self.changed_at) >= timeout {
                    self.redraw(random, now);
                }
            }
            Balance::Subflows => {
                let base_rtt = self.base_rtt;
                for subflow in &mut self.subflows {
                    let is_settled = now.saturating_sub(subflow.changed_at) > base_rtt;
                    let is_silent = now.saturating_sub(subflow.heard_at) > base_rtt / 2;
                    if is_settled && is_silent {
                        subflow.entropy = draw(random, SUBFLOW_ENTROPIES);
                        subflow.changed_at = now;
                    }
                }
            }
        }
    }

    fn redraw(&mut self, random: &mut ChaCha8Rng, now: Nanos) {
        self.subflows[0].entropy = draw(random, SUBFLOW_ENTROPIES);
        (self.changed_at, self.congested_rounds) = (now, 0);
    }
}

fn draw(random: &mut ChaCha8Rng, end: u64) -> u32 {
    ((u128::from(random.next_u64()) * u128::from(end)) >> 64) as u32
}
