//! How far a store had come when it answered a flush, and what openings keep of earlier ones.

use super::rules::Rules;

/// Sent with the answer to a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Milestone {
    /// Nonce of the opening.
    pub opening: u8,
    /// Its last checkpoint.
    pub checkpoint: u8,
    /// Log pages before this one are flushed.
    pub log_flushed: u8,
}

impl Milestone {
    fn covers(self, other: Self, rules: &Rules) -> bool {
        (self.opening == other.opening || !rules.milestone_names_the_opening)
            && (self.checkpoint >= other.checkpoint || !rules.milestone_counts_checkpoints)
            && self.log_flushed >= other.log_flushed
    }
}

/// The openings that led to a store.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Passage {
    /// Where this opening began.
    start: Option<Milestone>,
    /// How far earlier ones had come, latest first; those that changed nothing are left out.
    earlier: Vec<Milestone>,
}

impl Passage {
    /// Ends the previous opening; `found` is how far recovery got.
    pub fn end(&mut self, found: Milestone, rules: &Rules) {
        if self.start != Some(found) || self.earlier.is_empty() {
            if !rules.openings_keep_those_before {
                self.earlier.clear();
            }
            self.earlier.insert(0, found);
        }
    }

    pub fn begin(&mut self, start: Milestone) {
        self.start = Some(start);
    }

    /// The milestone to report for an opening that has come as far as `reached`.
    pub fn told(&self, reached: Milestone) -> Milestone {
        let before = self.earlier.first().filter(|_| self.start == Some(reached));
        before.copied().unwrap_or(reached)
    }

    /// Whether an opening that has come as far as `reached` contains everything at milestone
    /// `told`.
    pub fn contains(&self, reached: Milestone, told: Milestone, rules: &Rules) -> bool {
        reached.covers(told, rules) || self.earlier.iter().any(|found| found.covers(told, rules))
    }
}
