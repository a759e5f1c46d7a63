//! Sessions that share one link between two sites, and always have something to send.

use sealane_proto::congestion::{Algorithm, Domain};
use sealane_proto::fabric::Sites;
use sealane_proto::link::{LinkConfig, Nanos};
use sealane_proto::session::{Marks, SessionStatistics, Steering};

use super::run::run;
use super::sessions::{Sessions, SessionsSetup};
use super::{Balance, Cell, CellError, Congestion, FlowSetup};

/// Bytes that no session sends within a run.
const ENDLESS: u64 = 1 << 50;
/// Delay of a cable within a site.
const CABLE_NANOS: Nanos = 1_000;
/// How much faster than a session the cables within a site are.
const CABLE_SPEED: u64 = 100;

/// The settings of a run.
#[derive(Debug, Clone)]
pub struct Shared {
    /// Determines every random choice.
    pub seed: u64,
    /// The link, alike in both directions.
    pub link: LinkConfig,
    /// Rate of each session.
    pub rate_bytes_per_second: u64,
    /// When each session starts to send.
    pub starts: Vec<Nanos>,
    /// Their congestion controller; `None`: the rate alone.
    pub congestion: Option<Algorithm>,
    /// What marks mean.
    pub marks: Marks,
    /// Virtual time of the run.
    pub time: Nanos,
}

/// Runs the sessions and returns the statistics of the sending ends.
///
/// # Errors
/// If the link is not valid, or there are no sessions or too many.
pub fn run_shared(shared: &Shared) -> Result<Vec<SessionStatistics>, CellError> {
    let cable = LinkConfig::clean(
        shared.rate_bytes_per_second.saturating_mul(8 * CABLE_SPEED),
        CABLE_NANOS,
        1 << 40,
    );
    let flow = |(host, start): (u16, &Nanos)| FlowSetup {
        from: host,
        to: Sites::HOSTS + host,
        start: *start,
        bytes: ENDLESS,
    };
    let cell = Cell {
        seed: shared.seed,
        sites: Sites { near: cable, host: cable, border: cable, wan: shared.link, wan_links: 1 },
        flows: (0..).zip(&shared.starts).map(flow).collect(),
        // For flows without a session; here there are none.
        congestion: Congestion::Cubic,
        balance: Balance::Subflows,
        code: None,
        chains: Vec::new(),
        changes: Vec::new(),
        sample_every: 0,
        sample_host: 0,
        time_max: shared.time,
    };
    cell.validate()?;
    let line_bytes_per_second = shared.rate_bytes_per_second;
    let domain = Domain { line_bytes_per_second, ..cell.domain(0) };
    let steering = Steering {
        congestion: shared.congestion.map(|algorithm| (algorithm, domain)),
        marks: shared.marks,
        ..Steering::default()
    };
    let setup = SessionsSetup {
        paths: 1,
        marks: shared.marks,
        control_first: false,
        code: None,
        tampering: None,
    };
    let mut world = Sessions::new(&cell, setup, steering, line_bytes_per_second);
    run(&cell, &mut world);
    Ok(world.statistics())
}
