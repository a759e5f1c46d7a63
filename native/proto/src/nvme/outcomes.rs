//! Encoding of a target's answer about the outcomes of the changes of a secure queue that has ended
//! (`docs/formats/secure-queue.md` §3).

use super::status::Status;
use crate::sector::{BLOCK_BYTES, Block, DATA_BYTES};

/// Bytes before the list.
const HEADER_BYTES: usize = 8;
/// Bytes of one change.
const ENDED_BYTES: usize = 20;
/// Maximum changes that one answer lists: more than a queue's depth.
pub const ENDED_MAX: usize = (DATA_BYTES - HEADER_BYTES) / ENDED_BYTES;

/// Outcome of a command that changed blocks, or began to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Its number on the queue's connection.
    pub number: u64,
    /// Its status; Command Abort Requested if only some of its ranges are done.
    pub status: Status,
    /// Number of ranges of a deallocation that are done, from the first on; 0 for other commands.
    pub ranges: u16,
    /// Its mark, if it succeeded and the store keeps marks; otherwise 0.
    pub mark: u64,
}

/// Encodes an answer: the outcomes of the queue's changes, or that they aren't known (also if there
/// are more than [`ENDED_MAX`]). The rest of the block is zero.
pub fn encode(known: Option<&[Ended]>, block: &mut Block) {
    block.fill(0);
    let Some(changes) = known.filter(|changes| changes.len() <= ENDED_MAX) else { return };
    block[0] = 1;
    block[2..4].copy_from_slice(&(changes.len() as u16).to_le_bytes());
    let places = block[HEADER_BYTES..DATA_BYTES].as_chunks_mut::<ENDED_BYTES>().0;
    for (place, ended) in places.iter_mut().zip(changes) {
        place[..8].copy_from_slice(&ended.number.to_le_bytes());
        place[8..10].copy_from_slice(&ended.status.field().to_le_bytes());
        place[10..12].copy_from_slice(&ended.ranges.to_le_bytes());
        place[12..].copy_from_slice(&ended.mark.to_le_bytes());
    }
}

/// Decodes an answer; None if the target doesn't know the outcomes.
#[must_use]
pub fn decode(block: &[u8]) -> Option<Vec<Ended>> {
    let block: &Block = block.first_chunk::<BLOCK_BYTES>()?;
    let count = usize::from(u16::from_le_bytes([block[2], block[3]]));
    if block[0] != 1 || count > ENDED_MAX {
        return None;
    }
    let places = block[HEADER_BYTES..DATA_BYTES].as_chunks::<ENDED_BYTES>().0;
    let ended = |place: &[u8; ENDED_BYTES]| {
        let [n0, n1, n2, n3, n4, n5, n6, n7, s0, s1, r0, r1, mark @ ..] = *place;
        Ended {
            number: u64::from_le_bytes([n0, n1, n2, n3, n4, n5, n6, n7]),
            status: Status::from_field(u16::from_le_bytes([s0, s1])),
            ranges: u16::from_le_bytes([r0, r1]),
            mark: u64::from_le_bytes(mark),
        }
    };
    Some(places.iter().take(count).map(ended).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn changes(count: usize) -> Vec<Ended> {
        let ended = |number: u64| Ended {
            number: number << 40,
            status: if number.is_multiple_of(2) { Status::SUCCESS } else { Status::ABORTED },
            ranges: number as u16,
            mark: number << 33,
        };
        (1..=count as u64).map(ended).collect()
    }

    #[test]
    fn an_answer_is_decoded_from_its_bytes() {
        let mut block = [9; BLOCK_BYTES];
        for count in [0, 1, 128, ENDED_MAX] {
            encode(Some(&changes(count)), &mut block);
            assert_eq!(decode(&block), Some(changes(count)));
        }
    }

    #[test]
    fn unknown_outcomes_differ_from_an_empty_list() {
        let mut block = [9; BLOCK_BYTES];
        encode(None, &mut block);
        assert_eq!(decode(&block), None);
        encode(Some(&changes(ENDED_MAX + 1)), &mut block);
        assert_eq!(decode(&block), None);
        assert_eq!(decode(&[]), None);
        encode(Some(&[]), &mut block);
        block[2..4].copy_from_slice(&u16::MAX.to_le_bytes());
        assert_eq!(decode(&block), None, "more than a block holds");
    }
}
