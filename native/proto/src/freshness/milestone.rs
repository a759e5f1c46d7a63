//! How far a store had come when a flush ended. It is returned with the flush; a gateway that
//! remembers it can later check whether the store, opened again, contains that flush
//! (`docs/understand/crash-consistency.md` §4).

/// Bytes of an encoded milestone.
pub const MILESTONE_BYTES: usize = 32;

/// How far a store had come. It covers everything flushed by then.
///
/// Checkpoints and log pages are counted over all openings of a store, so they order the milestones
/// of one history. Two histories may reach the same numbers; the nonce distinguishes them, as each
/// opening draws its own and writes each log page once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Milestone {
    /// Nonce of the opening that flushed; not zero.
    pub opening: [u8; 16],
    /// Number of its last checkpoint.
    pub checkpoint: u64,
    /// Log pages before this one are flushed.
    pub log_flushed: u64,
}

impl Milestone {
    /// Encodes it: opening 16 bytes, checkpoint 8, log pages 8, little endian.
    #[must_use]
    pub fn encode(&self) -> [u8; MILESTONE_BYTES] {
        let mut bytes = [0; MILESTONE_BYTES];
        bytes[..16].copy_from_slice(&self.opening);
        bytes[16..24].copy_from_slice(&self.checkpoint.to_le_bytes());
        bytes[24..].copy_from_slice(&self.log_flushed.to_le_bytes());
        bytes
    }

    /// Decodes it; None for an opening of zeros, which means that there is no milestone.
    #[must_use]
    pub fn decode(bytes: &[u8; MILESTONE_BYTES]) -> Option<Self> {
        let (words, _) = bytes.as_chunks::<8>();
        let mut opening = [0; 16];
        opening.copy_from_slice(&bytes[..16]);
        let (checkpoint, log_flushed) =
            (u64::from_le_bytes(words[2]), u64::from_le_bytes(words[3]));
        (opening != [0; 16]).then_some(Self { opening, checkpoint, log_flushed })
    }

    /// Whether a store at this milestone contains everything covered by `other`.
    #[must_use]
    pub fn covers(&self, other: &Self) -> bool {
        self.opening == other.opening
            && self.checkpoint >= other.checkpoint
            && self.log_flushed >= other.log_flushed
    }

    /// Whether it is the later of two milestones of one history.
    #[must_use]
    pub fn is_after(&self, other: &Self) -> bool {
        (self.checkpoint, self.log_flushed) > (other.checkpoint, other.log_flushed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn milestone(opening: u8, checkpoint: u64, log_flushed: u64) -> Milestone {
        Milestone { opening: [opening; 16], checkpoint, log_flushed }
    }

    #[test]
    fn bytes_are_as_documented_and_are_decoded() {
        let some = milestone(7, 0x0102, 0x0304);
        let bytes = some.encode();
        assert_eq!(bytes[..16], [7; 16]);
        assert_eq!((bytes[16], bytes[17], bytes[24], bytes[25]), (2, 1, 4, 3));
        assert_eq!(Milestone::decode(&bytes), Some(some));
        assert_eq!(Milestone::decode(&[0; MILESTONE_BYTES]), None);
    }

    #[test]
    fn only_the_same_opening_at_least_as_far_covers_it() {
        let told = milestone(1, 4, 9);
        for (reached, covers) in [
            (milestone(1, 4, 9), true),
            (milestone(1, 5, 10), true),
            (milestone(1, 3, 10), false),
            (milestone(1, 5, 8), false),
            (milestone(2, 5, 10), false),
        ] {
            assert_eq!(reached.covers(&told), covers, "{reached:?}");
        }
    }

    #[test]
    fn milestones_of_one_history_are_ordered_over_its_openings() {
        assert!(milestone(1, 5, 9).is_after(&milestone(2, 4, 9)));
        assert!(milestone(1, 4, 10).is_after(&milestone(1, 4, 9)));
        assert!(!milestone(1, 4, 9).is_after(&milestone(1, 4, 9)));
    }
}
