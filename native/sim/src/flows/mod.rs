//! Many flows in one network, in virtual time: lean models of senders and receivers, with the
//! product's congestion controllers, on the product's packet fabric.
//!
//! A [`Cell`] determines a run completely. The models follow the released code of Uno
//! (arXiv:2510.15802): one acknowledgement for each packet, a time-out for each packet, and, with a
//! code, blocks whose missing packets the receiver asks for.

mod balance;
mod flow;
mod landing;
mod lean;
mod rivals;
mod run;
mod sessions;
mod shared;
#[cfg(test)]
mod tests;

use sealane_proto::fabric::Sites;
use sealane_proto::link::{LinkError, Nanos};

pub use balance::Balance;
pub use lean::run_cell;
pub use rivals::{Congestion, RIVALS};
pub use sessions::{SessionsSetup, Tampering, Victims, run_sessions};
pub use shared::{Shared, run_shared};

/// Payload of a packet; all packets are full.
pub const PAYLOAD_BYTES: u32 = 4096;
/// Headers of a packet, which are also all of an acknowledgement.
pub const HEADER_BYTES: u32 = 64;
/// Most flows of a run, which bounds its memory.
pub const FLOWS_MAX: usize = 100_000;

/// A flow: one message from a host to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowSetup {
    /// Number of the sending host …
    pub from: u16,
    /// … and of the receiving one.
    pub to: u16,
    /// When it starts.
    pub start: Nanos,
    /// Payload bytes.
    pub bytes: u64,
}

/// An erasure code: any `data` of the `data + parity` packets of a block are enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code {
    /// Data packets of a block.
    pub data: u8,
    /// Parity packets of a block.
    pub parity: u8,
}

impl Code {
    /// Packets of a block.
    fn packets(self) -> u32 {
        u32::from(self.data + self.parity)
    }
}

/// How a flow depends on another one that ends at its sender: its first chunk leaves at its start,
/// each other one when the chunk before it has arrived of the other flow. A ring all-reduce consists
/// of such flows; two that follow each other are requests and answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chain {
    /// Number of the flow that it follows.
    pub follows: u32,
    /// Bytes of a chunk, alike in both: whole packets.
    pub chunk_bytes: u64,
}

/// A change of a part of the network for a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// The part.
    pub place: Place,
    /// What becomes of it.
    pub effect: Effect,
    /// From when …
    pub start: Nanos,
    /// … until when.
    pub end: Nanos,
}

/// A part of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A link between the data centres, in one direction.
    Wan {
        /// Number of the data centre that it leaves, 0 or 1.
        from_site: u16,
        /// Number of the link.
        link: u16,
    },
    /// The last cable to a host.
    ToHost(u16),
}

/// What becomes of a part of the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// It carries nothing.
    Down,
    /// It carries only packets up to this many bytes.
    Narrow(u32),
    /// Its way is longer by this.
    Longer(Nanos),
    /// It has this rate in bits per second.
    Rate(u64),
}

impl Change {
    /// An outage of a link from the first data centre to the second.
    #[must_use]
    pub fn outage(link: u16, start: Nanos, end: Nanos) -> Self {
        Self { place: Place::Wan { from_site: 0, link }, effect: Effect::Down, start, end }
    }
}

/// The settings of a run.
#[derive(Debug, Clone)]
pub struct Cell {
    /// Determines every random choice.
    pub seed: u64,
    /// The network.
    pub sites: Sites,
    /// The flows.
    pub flows: Vec<FlowSetup>,
    /// Congestion control of all flows.
    pub congestion: Congestion,
    /// How flows choose their paths.
    pub balance: Balance,
    /// Code of the flows between data centres, if they use one.
    pub code: Option<Code>,
    /// The dependency of each flow, if it has one; empty if none has.
    pub chains: Vec<Option<Chain>>,
    /// What happens to the network.
    pub changes: Vec<Change>,
    /// Interval at which rates and a queue are observed; 0: never.
    pub sample_every: Nanos,
    /// Host whose port is observed.
    pub sample_host: u16,
    /// Virtual time at which the run ends, even if flows are unfinished.
    pub time_max: Nanos,
}

/// A cell that cannot be run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CellError {
    /// The configuration of a link is not valid.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// No flows, or too many.
    #[error("{0} flows; allowed: 1 to {FLOWS_MAX}")]
    Flows(usize),
    /// A flow names a host that does not exist, or sends to itself, or sends nothing.
    #[error("flow {0} needs two different hosts below {hosts} and at least one byte", hosts = 2 * Sites::HOSTS)]
    Flow(usize),
    /// Sessions have only the product's controllers.
    #[error("sessions need one of the product's controllers")]
    Rival,
    /// A code without data or parity.
    #[error("a code needs at least one data and one parity packet")]
    Code,
    /// A change names a link or a host that does not exist.
    #[error("there is no {0:?}")]
    Place(Place),
    /// A flow of chunks has to depend on one to its sender, and has no code.
    #[error(
        "a flow of chunks has to depend on one to its sender, of chunks of as many whole packets, and has no code; chains name all flows or none"
    )]
    Chain,
}

/// What became of a flow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FlowOutcome {
    /// When the sender knew that everything had arrived; 0 if it never did.
    pub finished_at: Nanos,
    /// Packets sent …
    pub sent_packets: u64,
    /// … and how many of them had been sent before.
    pub repeated_packets: u64,
}

/// The state of a run at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// The time.
    pub at: Nanos,
    /// Bytes of each flow that have been acknowledged so far …
    pub acked_bytes: Vec<u64>,
    /// … and packets that it has sent, with those that were sent before.
    pub sent_packets: Vec<u64>,
    /// Bytes that wait at the port to the observed host.
    pub queued_bytes: u64,
}

/// Results of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CellOutcome {
    /// One for each flow.
    pub flows: Vec<FlowOutcome>,
    /// Observations, if asked for.
    pub samples: Vec<Sample>,
    /// Packets that arrived at a host.
    pub arrivals: u64,
    /// Data packets that a full buffer refused.
    pub overflowed_packets: u64,
    /// Data packets that a link did not carry because it was down, or because they were too long.
    pub down_packets: u64,
    /// When each chunk had arrived, by flow, if flows depend on each other.
    pub chunks: Vec<Vec<Nanos>>,
}

impl Cell {
    pub(crate) fn validate(&self) -> Result<(), CellError> {
        let Sites { near, host, border, wan, .. } = &self.sites;
        for link in [near, host, border, wan] {
            link.validate()?;
        }
        if self.flows.is_empty() || self.flows.len() > FLOWS_MAX {
            return Err(CellError::Flows(self.flows.len()));
        }
        let hosts = 2 * Sites::HOSTS;
        let is_bad = |flow: &FlowSetup| {
            flow.from >= hosts || flow.to >= hosts || flow.from == flow.to || flow.bytes == 0
        };
        if let Some(index) = self.flows.iter().position(is_bad) {
            return Err(CellError::Flow(index));
        }
        if self.code.is_some_and(|code| code.data == 0 || code.parity == 0) {
            return Err(CellError::Code);
        }
        if !self.chains.is_empty() && !self.are_chains_valid() {
            return Err(CellError::Chain);
        }
        let is_absent = |change: &&Change| match change.place {
            Place::Wan { from_site, link } => from_site > 1 || link >= self.sites.wan_links,
            Place::ToHost(host) => host >= hosts,
        };
        match self.changes.iter().find(is_absent) {
            Some(change) => Err(CellError::Place(change.place)),
            None => Ok(()),
        }
    }

    fn are_chains_valid(&self) -> bool {
        let is_valid = |(flow, chain): (&FlowSetup, &Option<Chain>)| {
            let Some(chain) = chain else { return true };
            let index = chain.follows as usize;
            let Some((followed, Some(its))) = self.flows.get(index).zip(self.chains.get(index))
            else {
                return false;
            };
            followed.to == flow.from
                && its.chunk_bytes == chain.chunk_bytes
                && chain.chunk_bytes > 0
                && chain.chunk_bytes.is_multiple_of(PAYLOAD_BYTES.into())
        };
        let are_all = self.chains.len() == self.flows.len() && self.code.is_none();
        are_all && self.flows.iter().zip(&self.chains).all(is_valid)
    }

    /// Flows that follow each flow.
    fn followers(&self) -> Vec<Vec<u32>> {
        let mut followers = vec![Vec::new(); self.flows.len()];
        for (index, chain) in (0..).zip(&self.chains) {
            if let Some(chain) = chain {
                followers[chain.follows as usize].push(index);
            }
        }
        followers
    }
}
