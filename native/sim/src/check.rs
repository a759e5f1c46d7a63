//! Checkers: they watch a run from outside the machines and record what must never happen.

use sealane_proto::link::{NANOS_PER_SECOND, Nanos};
use sealane_proto::session::packet::{Header, Kind};
use sealane_proto::session::{BURST_PACKETS, CompletionStatus};

/// Most violations recorded; a broken run could cause millions.
const VIOLATIONS_MAX: usize = 32;

/// A rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// A completed receive holds exactly the sent bytes, and its buffer nothing else.
    PayloadEqual,
    /// No byte of a message is written twice.
    WrittenOnce,
    /// Corrupted, repeated and late datagrams do not change memory.
    MemoryUnchanged,
    /// Every request completes exactly once, with `Ok`.
    CompletedOnce,
    /// A unit is only sent if the peer has posted a receive that is long enough.
    CreditKept,
    /// No interval has more wire bytes than the rate and one burst allow.
    RateKept,
    /// A chunk is published once, after all its bytes.
    ChunkLanded,
    /// The run ends within its time, and the machines make progress.
    Finished,
}

/// One broken rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// The rule.
    pub rule: Rule,
    /// Virtual time of the violation.
    pub at: Nanos,
    /// What was found.
    pub detail: String,
}

/// The findings so far.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub now: Nanos,
    pub violations: Vec<Violation>,
}

impl Findings {
    pub fn add(&mut self, rule: Rule, detail: impl FnOnce() -> String) {
        if self.violations.len() < VIOLATIONS_MAX {
            self.violations.push(Violation { rule, at: self.now, detail: detail() });
        }
    }
}

/// Checks [`Rule::RateKept`] for one end: a bucket that leaks at the rate must never hold more than
/// a burst.
#[derive(Debug)]
pub(crate) struct RateChecker {
    rate_bytes_per_second: u64,
    burst_bytes: u64,
    /// In bytes × nanoseconds per second.
    level: u128,
    last: Nanos,
}

impl RateChecker {
    pub fn new(rate_bytes_per_second: u64, packet_bytes_max: u64) -> Self {
        let burst_bytes = BURST_PACKETS * packet_bytes_max;
        Self { rate_bytes_per_second, burst_bytes, level: 0, last: 0 }
    }

    pub fn sent(&mut self, wire_bytes: u64, findings: &mut Findings) {
        let elapsed = u128::from(findings.now - self.last);
        self.last = findings.now;
        self.level = self.level.saturating_sub(elapsed * u128::from(self.rate_bytes_per_second));
        self.level += u128::from(wire_bytes) * u128::from(NANOS_PER_SECOND);
        // The pacer may round its times down to a whole nanosecond.
        let slack = u128::from(self.rate_bytes_per_second);
        if self.level > u128::from(self.burst_bytes) * u128::from(NANOS_PER_SECOND) + slack {
            let bytes = self.level / u128::from(NANOS_PER_SECOND);
            findings.add(Rule::RateKept, || format!("{bytes} bytes ahead of the rate"));
        }
    }
}

/// Checks [`Rule::CreditKept`]; holds the lengths of all posted receives by message number.
#[derive(Debug, Default)]
pub(crate) struct CreditChecker {
    posted: Vec<u64>,
}

impl CreditChecker {
    pub fn posted(&mut self, length_max: u64) {
        self.posted.push(length_max);
    }

    pub fn sent(&self, datagram: &[u8], findings: &mut Findings) {
        if let Ok((Header { kind: Kind::Unit { message, length, .. }, .. }, _)) =
            Header::decode(datagram)
        {
            match self.posted.get(message as usize) {
                Some(length_max) if length <= *length_max => {}
                found => findings.add(Rule::CreditKept, || {
                    format!(
                        "message {message} of {length} bytes sent, length of its receive: {found:?}"
                    )
                }),
            }
        }
    }
}

/// Checks [`Rule::CompletedOnce`] for one end.
#[derive(Debug)]
pub(crate) struct CompletionChecker {
    what: &'static str,
    completed: Vec<bool>,
    missing: usize,
}

impl CompletionChecker {
    pub fn new(what: &'static str, count: u32) -> Self {
        Self { what, completed: vec![false; count as usize], missing: count as usize }
    }

    pub fn completed(&mut self, message: u64, status: CompletionStatus, findings: &mut Findings) {
        let what = self.what;
        match self.completed.get_mut(message as usize) {
            Some(done) if !*done && status == CompletionStatus::Ok => {
                *done = true;
                self.missing -= 1;
            }
            found => findings.add(Rule::CompletedOnce, || {
                format!("{what} {message} completed with {status:?}, completed before: {found:?}")
            }),
        }
    }

    pub fn is_completed(&self, message: u64) -> bool {
        self.completed.get(message as usize).is_some_and(|done| *done)
    }

    pub fn is_done(&self) -> bool {
        self.missing == 0
    }

    pub fn finish(&self, findings: &mut Findings) {
        let missing = self.completed.iter().filter(|done| !**done).count();
        if missing > 0 {
            findings
                .add(Rule::CompletedOnce, || format!("{missing} {} never completed", self.what));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(findings: &Findings) -> Vec<Rule> {
        findings.violations.iter().map(|violation| violation.rule).collect()
    }

    #[test]
    fn a_burst_is_allowed_and_one_packet_more_is_not() {
        let mut findings = Findings::default();
        let mut checker = RateChecker::new(1_000_000, 1500);
        (0..BURST_PACKETS).for_each(|_| checker.sent(1500, &mut findings));
        assert_eq!(rules(&findings), []);
        checker.sent(1500, &mut findings);
        assert_eq!(rules(&findings), [Rule::RateKept]);
    }

    #[test]
    fn completions_are_counted() {
        let mut findings = Findings::default();
        let mut checker = CompletionChecker::new("sends", 3);
        checker.completed(0, CompletionStatus::Ok, &mut findings);
        assert_eq!(rules(&findings), []);
        checker.completed(0, CompletionStatus::Ok, &mut findings);
        checker.completed(1, CompletionStatus::Aborted, &mut findings);
        checker.completed(3, CompletionStatus::Ok, &mut findings);
        checker.finish(&mut findings);
        assert_eq!(rules(&findings), [Rule::CompletedOnce; 4]);
    }
}
