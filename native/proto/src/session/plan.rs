//! A session's plan: the loss recovery scheme for each message size, used by sends that leave the
//! choice open.
//!
//! A model outside this crate computes it (docs/understand/sessions.md) and installs it as a whole;
//! here it is only looked up.

use crate::link::Nanos;

use super::layout::Layout;
use super::requests::Reliability;

/// Most rows of a plan: one for each power of two that a message length can reach.
pub const PLAN_ROWS_MAX: usize = 64;

/// Longest pause before parity: a second.
pub const PARITY_GAP_MAX: Nanos = 1_000_000_000;

/// One row of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanRow {
    /// Longest message it applies to, in bytes.
    pub length_max: u64,
    /// The scheme for these messages.
    pub reliability: Reliability,
    /// Pause between the data and the parity of such a message, so that one burst of losses does
    /// not hit both.
    pub parity_gap: Nanos,
}

/// Why a plan was refused; the current one stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// No rows, or too many.
    #[error("the plan has {0} rows; allowed: 1 to {PLAN_ROWS_MAX}")]
    Rows(usize),
    /// Lengths are not ascending.
    #[error("row {0} of the plan must be for longer messages than the row before it")]
    Order(usize),
    /// The code is not valid, or the scheme is again open or doesn't recover losses.
    #[error("row {0} of the plan has no valid scheme")]
    Scheme(usize),
    /// The pause before parity is too long.
    #[error("row {0} of the plan has a pause of more than {PARITY_GAP_MAX} ns before parity")]
    Gap(usize),
}

/// A valid plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan(Vec<PlanRow>);

impl Default for Plan {
    /// Selective repeat for all lengths, which is right until the path is known.
    fn default() -> Self {
        let reliability = Reliability::SelectiveRepeat;
        Self(vec![PlanRow { length_max: u64::MAX, reliability, parity_gap: 0 }])
    }
}

impl Plan {
    /// Checks the rows of a plan for a session with this unit.
    pub fn new(rows: &[PlanRow], unit_bytes: u16) -> Result<Self, PlanError> {
        if rows.is_empty() || rows.len() > PLAN_ROWS_MAX {
            return Err(PlanError::Rows(rows.len()));
        }
        for (index, row) in rows.iter().enumerate() {
            if index > 0 && rows[index - 1].length_max >= row.length_max {
                return Err(PlanError::Order(index));
            }
            let code = code_of(row.reliability);
            let is_reliable = row.reliability != Reliability::Unreliable;
            let code = code.filter(|_| is_reliable);
            if code.is_none_or(|(k, m, _)| Layout::new(0, unit_bytes, k, m).is_none()) {
                return Err(PlanError::Scheme(index));
            }
            if row.parity_gap > PARITY_GAP_MAX {
                return Err(PlanError::Gap(index));
            }
        }
        Ok(Self(rows.to_vec()))
    }

    /// The scheme for a message of this length, and the pause before its parity; the last row also
    /// applies to all longer ones.
    #[must_use]
    pub fn choose(&self, length: u64) -> (Reliability, Nanos) {
        let row = self.0.iter().find(|row| length <= row.length_max).or(self.0.last());
        row.map_or((Reliability::SelectiveRepeat, 0), |row| (row.reliability, row.parity_gap))
    }
}

/// (k, m, depth) of a concrete scheme; k = m = 0 is selective repeat. `None` if the code is not
/// valid. Depth needs no memory of its own: waiting parity is bounded by [`super::order::Order`] at
/// this end, and by the receiver at the other.
pub(super) fn code_of(reliability: Reliability) -> Option<(u8, u8, u8)> {
    match reliability {
        Reliability::SelectiveRepeat | Reliability::Unreliable => Some((0, 0, 1)),
        Reliability::ErasureCoded { k, m, depth } => {
            (k > 0 && m > 0 && depth > 0).then_some((k, m, depth))
        }
        Reliability::Auto => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODED: Reliability = Reliability::ErasureCoded { k: 32, m: 8, depth: 4 };

    fn row(length_max: u64, reliability: Reliability) -> PlanRow {
        PlanRow { length_max, reliability, parity_gap: 0 }
    }

    #[test]
    fn the_first_row_that_is_long_enough_counts() {
        let rows = [row(1000, Reliability::SelectiveRepeat), row(5000, CODED)];
        let plan = Plan::new(&rows, 1408).unwrap();
        assert_eq!(plan.choose(0).0, Reliability::SelectiveRepeat);
        assert_eq!(plan.choose(1000).0, Reliability::SelectiveRepeat);
        assert_eq!(plan.choose(1001).0, CODED);
        assert_eq!(plan.choose(u64::MAX).0, CODED, "the last row is for longer ones, too");
        assert_eq!(Plan::default().choose(1 << 30).0, Reliability::SelectiveRepeat);
    }

    #[test]
    fn plans_that_cannot_be_followed_are_refused() {
        let refusal = |rows: &[PlanRow]| Plan::new(rows, 65_000).unwrap_err();
        let coded = |k, m, depth| Reliability::ErasureCoded { k, m, depth };
        assert_eq!(refusal(&[]), PlanError::Rows(0));
        let many: Vec<_> = (0..65).map(|i| row(i, Reliability::SelectiveRepeat)).collect();
        assert_eq!(refusal(&many), PlanError::Rows(65));
        assert!(Plan::new(&many[..64], 1408).is_ok());
        assert_eq!(refusal(&[row(5, CODED), row(5, CODED)]), PlanError::Order(1));
        for reliability in [Reliability::Auto, Reliability::Unreliable] {
            assert_eq!(refusal(&[row(5, reliability)]), PlanError::Scheme(0));
        }
        for (k, m, depth) in [(0, 1, 1), (1, 0, 1), (200, 56, 1), (4, 2, 0)] {
            let rows = [row(1, CODED), row(2, coded(k, m, depth))];
            assert_eq!(refusal(&rows), PlanError::Scheme(1), "({k}, {m}) {depth}");
        }
        assert!(Plan::new(&[row(1, coded(1, 254, 255))], 65_000).is_ok(), "depth costs nothing");
    }
}
