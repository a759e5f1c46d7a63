//! Authentication of one I/O queue between gateway and target (`docs/formats/secure-queue.md` §2).
//!
//! Both sides count commands from 1, in the order of the TCP stream; only [`CommandCounter::take`]
//! advances the number. There is a separate key for each purpose and direction, and a MAC's nonce
//! is (command number, index), so no (key, nonce) pair authenticates two messages.

use aws_lc_rs::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use zerocopy::IntoBytes;

use crate::aead::{MacKey, NONCE_BYTES, NotAuthentic, Secret, TRUNCATED_MAC_BYTES};
use crate::nvme::command::{DATASET_MANAGEMENT, SUBMISSION_BYTES, SubmissionEntry};
use crate::nvme::status::Status;
use crate::sector::{Block, DATA_BYTES, METADATA_BYTES, field, metadata_mut};

/// Context to which a queue's keys are bound, in addition to its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueContext {
    /// Volume UUID.
    pub volume_id: [u8; 16],
    /// NQN of the host (the gateway).
    pub host_nqn: String,
    /// Queue id, 1 and up.
    pub queue_id: u16,
    /// Association epoch: increases with each association of this gateway and volume.
    pub association_epoch: u64,
    /// Incarnation of the target: changes with each start of its process.
    pub incarnation: u64,
}

impl QueueContext {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(34 + self.host_nqn.len());
        bytes.extend_from_slice(&self.volume_id);
        bytes.extend_from_slice(&self.queue_id.to_le_bytes());
        bytes.extend_from_slice(&self.association_epoch.to_le_bytes());
        bytes.extend_from_slice(&self.incarnation.to_le_bytes());
        bytes.extend_from_slice(self.host_nqn.as_bytes());
        bytes
    }
}

/// Counts the commands of a connection. Each side has one for each connection.
#[derive(Debug, Default)]
pub struct CommandCounter(u64);

impl CommandCounter {
    /// The next command's number, from 1. No other function advances it.
    pub fn take(&mut self) -> u64 {
        self.0 += 1;
        self.0
    }

    /// The number taken last; 0 if there was none.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.0
    }
}

/// Direction in which a sector is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the gateway to the target.
    Write,
    /// From the target to the gateway.
    Read,
}

/// The contents of a completion that its MAC authenticates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Opcode of the command.
    pub opcode: u8,
    /// Flags of the command.
    pub flags: u8,
    /// First LBA of the command.
    pub start_lba: u64,
    /// Number of blocks executed; 0 unless the command succeeded.
    pub block_count: u32,
    /// Status.
    pub status: Status,
    /// The mark of a successful change, if the store keeps marks; otherwise 0.
    pub mark: u64,
}

/// The keys of one secure queue; the same on both sides.
#[derive(Debug)]
pub struct SecureQueue {
    command: MacKey,
    completion: MacKey,
    write_sector: MacKey,
    read_sector: MacKey,
    association_epoch: u64,
    incarnation: u64,
    name: u64,
    host_nqn: String,
}

/// Digest of a command's range list: SHA-256 of a dataset management command's in-capsule data,
/// zero for every other command.
fn list_digest(entry: &SubmissionEntry, list: &[u8]) -> [u8; SHA256_OUTPUT_LEN] {
    let mut bytes = [0; SHA256_OUTPUT_LEN];
    if entry.opcode == DATASET_MANAGEMENT {
        bytes.copy_from_slice(digest(&SHA256, list).as_ref());
    }
    bytes
}

impl SecureQueue {
    /// Derives the four keys from the queue's secret.
    #[must_use]
    pub fn new(secret: &Secret, context: &QueueContext) -> Self {
        let bytes = context.encode();
        let key = |label: &str| MacKey::new(&secret.derive(label, &bytes));
        // The MAC of an empty message under a separate key, truncated to the size of CDW10-11.
        let [n0, n1, n2, n3, n4, n5, n6, n7, ..] =
            key("sealane secure queue v2 name").mac(nonce(0, 0), &[]);
        let name = u64::from_le_bytes([n0, n1, n2, n3, n4, n5, n6, n7]);
        Self {
            command: key("sealane secure queue v2 command"),
            completion: key("sealane secure queue v2 completion"),
            write_sector: key("sealane secure queue v2 write sector"),
            read_sector: key("sealane secure queue v2 read sector"),
            association_epoch: context.association_epoch,
            incarnation: context.incarnation,
            name,
            host_nqn: context.host_nqn.clone(),
        }
    }

    /// The name of this queue on both sides: unique and not secret.
    #[must_use]
    pub fn name(&self) -> u64 {
        self.name
    }

    /// Association epoch that the keys are bound to.
    #[must_use]
    pub fn association_epoch(&self) -> u64 {
        self.association_epoch
    }

    /// NQN of the host that the keys are bound to.
    #[must_use]
    pub fn host_nqn(&self) -> &str {
        &self.host_nqn
    }

    fn command_message(
        &self,
        entry: &SubmissionEntry,
        list: &[u8],
    ) -> [u8; SUBMISSION_BYTES + 8 + SHA256_OUTPUT_LEN] {
        let mut blank = *entry;
        blank.cdw2_3 = [0; 8];
        blank.cdw14_15 = [0; 8];
        let mut message = [0; SUBMISSION_BYTES + 8 + SHA256_OUTPUT_LEN];
        message[..SUBMISSION_BYTES].copy_from_slice(blank.as_bytes());
        message[SUBMISSION_BYTES..SUBMISSION_BYTES + 8]
            .copy_from_slice(&self.association_epoch.to_le_bytes());
        message[SUBMISSION_BYTES + 8..].copy_from_slice(&list_digest(entry, list));
        message
    }

    /// Writes the MAC of command `number` into the entry. Call it once for each number. `list` is
    /// the range list of a dataset management command; it is ignored for every other command.
    pub fn seal_command(&self, number: u64, entry: &mut SubmissionEntry, list: &[u8]) {
        let mac = self.command.mac(nonce(number, 0), &self.command_message(entry, list));
        entry.cdw2_3.copy_from_slice(&mac[..8]);
        entry.cdw14_15.copy_from_slice(&mac[8..]);
    }

    /// Verifies that this entry, with this range list, is command `number` of this queue.
    pub fn verify_command(
        &self,
        number: u64,
        entry: &SubmissionEntry,
        list: &[u8],
    ) -> Result<(), NotAuthentic> {
        let mac = [entry.cdw2_3, entry.cdw14_15].concat();
        self.command.verify(nonce(number, 0), &self.command_message(entry, list), &mac)
    }

    fn sector_key(&self, direction: Direction) -> &MacKey {
        match direction {
            Direction::Write => &self.write_sector,
            Direction::Read => &self.read_sector,
        }
    }

    /// Writes the sector MAC of block `index` of command `number`. Call it once for each (number,
    /// index).
    pub fn stamp_sector(
        &self,
        direction: Direction,
        number: u64,
        index: u32,
        lba: u64,
        block: &mut Block,
    ) {
        place_lba(lba, metadata_mut(block, field::MAC));
        let mac = self.sector_key(direction).mac(nonce(number, index), &block[..]);
        metadata_mut(block, field::MAC).copy_from_slice(&mac);
    }

    /// As [`Self::stamp_sector`], into a copy of the block's metadata: the block stays as it is.
    pub fn stamp_metadata(
        &self,
        direction: Direction,
        number: u64,
        index: u32,
        lba: u64,
        (data, metadata): (&[u8; DATA_BYTES], &mut [u8; METADATA_BYTES]),
    ) {
        let place = field::MAC.0..field::MAC.1;
        place_lba(lba, &mut metadata[place.clone()]);
        let pieces = [&data[..], &metadata[..]];
        let mac = self.sector_key(direction).mac_of_pieces(nonce(number, index), pieces);
        metadata[place].copy_from_slice(&mac);
    }

    /// Verifies the sector MAC of block `index` of command `number` and zeroes the field, as it is
    /// on disk.
    pub fn verify_sector(
        &self,
        direction: Direction,
        number: u64,
        index: u32,
        lba: u64,
        block: &mut Block,
    ) -> Result<(), NotAuthentic> {
        let mut mac = [0; 16];
        mac.copy_from_slice(metadata_mut(block, field::MAC));
        place_lba(lba, metadata_mut(block, field::MAC));
        let verified = self.sector_key(direction).verify(nonce(number, index), &block[..], &mac);
        metadata_mut(block, field::MAC).fill(0);
        verified
    }

    fn completion_message(&self, number: u64, outcome: &Outcome) -> [u8; 40] {
        let mut message = [0; 40];
        message[..8].copy_from_slice(&number.to_le_bytes());
        message[8] = outcome.opcode;
        message[9] = outcome.flags;
        message[10..18].copy_from_slice(&outcome.start_lba.to_le_bytes());
        message[18..22].copy_from_slice(&outcome.block_count.to_le_bytes());
        message[22..24].copy_from_slice(&outcome.status.field().to_le_bytes());
        message[24..32].copy_from_slice(&self.incarnation.to_le_bytes());
        message[32..].copy_from_slice(&outcome.mark.to_le_bytes());
        message
    }

    /// MAC of the completion of command `number`. Call it once for each number.
    #[must_use]
    pub fn completion_mac(&self, number: u64, outcome: &Outcome) -> [u8; TRUNCATED_MAC_BYTES] {
        let mac = self.completion.mac(nonce(number, 0), &self.completion_message(number, outcome));
        let mut short = [0; TRUNCATED_MAC_BYTES];
        short.copy_from_slice(&mac[..TRUNCATED_MAC_BYTES]);
        short
    }

    /// Verifies that command `number` ended with this outcome.
    pub fn verify_completion(
        &self,
        number: u64,
        outcome: &Outcome,
        mac: &[u8; TRUNCATED_MAC_BYTES],
    ) -> Result<(), NotAuthentic> {
        self.completion.verify(nonce(number, 0), &self.completion_message(number, outcome), mac)
    }
}

/// Writes the LBA into the MAC field, where it is while the MAC is computed.
fn place_lba(lba: u64, place: &mut [u8]) {
    place.fill(0);
    place[..8].copy_from_slice(&lba.to_le_bytes());
}

fn nonce(number: u64, index: u32) -> [u8; NONCE_BYTES] {
    let mut nonce = [0; NONCE_BYTES];
    nonce[..8].copy_from_slice(&number.to_le_bytes());
    nonce[8..].copy_from_slice(&index.to_le_bytes());
    nonce
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sector::{BLOCK_BYTES, set_unwritten};

    fn context() -> QueueContext {
        QueueContext {
            volume_id: [1; 16],
            host_nqn: "nqn.2026-11.dev.sealane:host".into(),
            queue_id: 1,
            association_epoch: 4,
            incarnation: 9,
        }
    }

    fn queue(context: &QueueContext) -> SecureQueue {
        SecureQueue::new(&Secret::take(&mut [8; 32]), context)
    }

    #[test]
    fn every_bit_of_a_command_and_its_number_are_bound() {
        let queue = queue(&context());
        let mut entry = SubmissionEntry { opcode: 1, ..SubmissionEntry::default() };
        queue.seal_command(7, &mut entry, &[]);
        queue.verify_command(7, &entry, &[]).unwrap();
        queue.verify_command(8, &entry, &[]).unwrap_err();
        for bit in 0..SUBMISSION_BYTES * 8 {
            let mut flipped = entry;
            flipped.as_mut_bytes()[bit / 8] ^= 1 << (bit % 8);
            queue.verify_command(7, &flipped, &[]).unwrap_err();
        }
    }

    #[test]
    fn every_part_of_the_context_separates_queues() {
        let mut entry = SubmissionEntry::default();
        let (mut block, own) = ([0; BLOCK_BYTES], queue(&context()));
        own.seal_command(1, &mut entry, &[]);
        own.stamp_sector(Direction::Write, 1, 0, 77, &mut block);
        let changes: [fn(&mut QueueContext); 5] = [
            |c| c.volume_id[0] ^= 1,
            |c| c.host_nqn.push('x'),
            |c| c.queue_id += 1,
            |c| c.association_epoch += 1,
            |c| c.incarnation += 1,
        ];
        for change in changes {
            let mut other = context();
            change(&mut other);
            let other = queue(&other);
            other.verify_command(1, &entry, &[]).unwrap_err();
            // Unlike a command's MAC, a sector's depends on the context only through its key.
            other.verify_sector(Direction::Write, 1, 0, 77, &mut block.clone()).unwrap_err();
        }
    }

    #[test]
    fn a_sector_mac_is_valid_for_one_lba_one_command_and_one_direction() {
        let queue = queue(&context());
        let mut block = [0; BLOCK_BYTES];
        set_unwritten(&mut block);
        queue.stamp_sector(Direction::Read, 5, 2, 77, &mut block);
        let check = |direction, number, index, lba, mut block: Block| {
            queue.verify_sector(direction, number, index, lba, &mut block).is_ok()
        };
        assert!(check(Direction::Read, 5, 2, 77, block));
        assert!(!check(Direction::Write, 5, 2, 77, block));
        assert!(!check(Direction::Read, 6, 2, 77, block));
        assert!(!check(Direction::Read, 5, 3, 77, block));
        assert!(!check(Direction::Read, 5, 2, 78, block));
        for bit in (0..BLOCK_BYTES * 8).step_by(61).chain(4096 * 8..BLOCK_BYTES * 8) {
            let mut flipped = block;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(!check(Direction::Read, 5, 2, 77, flipped), "bit {bit}");
        }
    }

    #[test]
    fn every_part_of_an_outcome_is_bound() {
        let queue = queue(&context());
        let outcome = Outcome {
            opcode: 1,
            flags: 0x40,
            start_lba: 3,
            block_count: 8,
            status: Status::SUCCESS,
            mark: 5,
        };
        let mac = queue.completion_mac(3, &outcome);
        queue.verify_completion(3, &outcome, &mac).unwrap();
        queue.verify_completion(4, &outcome, &mac).unwrap_err();
        for other in [
            Outcome { opcode: 2, ..outcome },
            Outcome { flags: 0, ..outcome },
            Outcome { start_lba: 4, ..outcome },
            Outcome { block_count: 7, ..outcome },
            Outcome { status: Status::SUCCESS.final_(), ..outcome },
            Outcome { mark: 5 + (1 << 32), ..outcome },
        ] {
            queue.verify_completion(3, &other, &mac).unwrap_err();
        }
        let restarted = QueueContext { incarnation: 10, ..context() };
        SecureQueue::new(&Secret::take(&mut [8; 32]), &restarted)
            .verify_completion(3, &outcome, &mac)
            .unwrap_err();
    }

    #[test]
    fn command_numbers_start_at_one_and_never_repeat() {
        let mut counter = CommandCounter::default();
        assert_eq!([counter.take(), counter.take(), counter.take()], [1, 2, 3]);
    }
}
