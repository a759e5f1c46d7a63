//! Checks and decodes a command's bytes: whether it may be executed, the length of its data, and
//! its operation (NVM Command Set 1.0 §3.2; NVMe Base 2.0 §7 for reservations).

use super::command::{
    COMPARE, DATASET_MANAGEMENT, DEALLOCATE_ATTRIBUTE, DEALLOCATE_BIT, FLAGS_SGL, FLUSH,
    FLUSH_MILESTONE, FUSED, OPENINGS, OUTCOMES, PROTECTION_INFORMATION, RANGE_BYTES, READ,
    RESERVATION_ACQUIRE, RESERVATION_REGISTER, RESERVATION_RELEASE, RESERVATION_REPORT,
    SGL_IN_CAPSULE, SGL_TRANSPORT, SubmissionEntry, Transfer, VERIFY, WRITE, WRITE_IF,
    WRITE_ZEROES,
};
use super::operation::{
    Access, AcquireAction, CommandSet, FUSED_BLOCKS_MAX, LbaRange, NamespaceFormat, Operation,
    Persistence, RANGES_MAX, RegisterAction, ReservationType,
};
use super::status::Status;

/// Broadcast namespace id, allowed in a flush.
const ALL_NAMESPACES: u32 = u32::MAX;
/// Bits of CDW12: directive type of a write.
const DIRECTIVE_TYPE: u32 = 0xf << 20;
/// Reservation commands: the current key isn't checked (IEKEY, bit 3 of CDW10).
const IGNORE_EXISTING_KEY: u32 = 1 << 3;
/// Bytes of the data of a reservation register or acquire: two keys.
const TWO_KEYS_BYTES: u64 = 16;
/// Bytes of the data of a reservation release: one key.
const ONE_KEY_BYTES: u64 = 8;

/// Rules against which the commands of a queue are checked.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules<'a> {
    pub(super) namespaces: &'a [NamespaceFormat],
    pub(super) transfer_max: usize,
    pub(super) is_secure: bool,
}

impl Rules<'_> {
    /// Makes all checks that need only a command's entry; `carried` bytes of data follow in its
    /// capsule. Returns the bytes to come from the host, in the capsule or on request.
    pub(super) fn check(&self, entry: &SubmissionEntry, carried: usize) -> Result<usize, Status> {
        let needed = self.needed(entry).ok_or(Status::INVALID_OPCODE.final_())?;
        let nsid = entry.nsid.get();
        let direction = entry.transfer_direction();
        if direction == Transfer::None && carried > 0 {
            return Err(Status::SGL_LENGTH_INVALID.final_());
        }
        if entry.opcode == FLUSH && nsid == ALL_NAMESPACES {
            return Ok(0);
        }
        let namespace = self.namespaces.iter().find(|known| known.nsid == nsid);
        let namespace = namespace.ok_or(Status::INVALID_NAMESPACE.final_())?;
        if !namespace.commands.contains(needed) {
            return Err(Status::INVALID_OPCODE.final_());
        }
        match namespace.access {
            Access::Refused(status) => return Err(status),
            Access::ReadOnly if changes_blocks(entry) => {
                return Err(Status::NAMESPACE_WRITE_PROTECTED.final_());
            }
            Access::ReadOnly | Access::Full => {}
        }
        let kind_of_pointer = entry.flags & !FUSED;
        if kind_of_pointer != FLAGS_SGL && (direction != Transfer::None || kind_of_pointer != 0) {
            return Err(Status::INVALID_FIELD.final_());
        }
        check_fused(entry, namespace)?;
        if entry.has_block_range() {
            self.check_range(entry, namespace)?;
        }
        let (least, most) = self.data_bytes(entry, namespace)?;
        let from_host = direction == Transfer::HostToController;
        if direction != Transfer::None {
            self.check_data_pointer(entry, carried as u64, from_host, least, most)?;
        }
        Ok(if from_host { entry.sgl.length.get() as usize } else { 0 })
    }

    /// Optional commands that a namespace must offer for this one; `None` if the queue doesn't
    /// support it.
    fn needed(&self, entry: &SubmissionEntry) -> Option<CommandSet> {
        Some(match entry.opcode {
            FLUSH | READ | WRITE => CommandSet::NONE,
            FLUSH_MILESTONE | OUTCOMES | OPENINGS if self.is_secure => CommandSet::NONE,
            COMPARE => CommandSet::COMPARE,
            WRITE_ZEROES => CommandSet::WRITE_ZEROES,
            DATASET_MANAGEMENT => CommandSet::DEALLOCATE,
            VERIFY => CommandSet::VERIFY,
            WRITE_IF if self.is_secure => CommandSet::WRITE_IF,
            RESERVATION_REGISTER | RESERVATION_REPORT | RESERVATION_ACQUIRE
            | RESERVATION_RELEASE
                if !self.is_secure =>
            {
                CommandSet::RESERVATIONS
            }
            _ => return None,
        })
    }

    fn check_range(&self, entry: &SubmissionEntry, of: &NamespaceFormat) -> Result<(), Status> {
        // These namespaces support neither protection information nor directives.
        let directive = matches!(entry.opcode, WRITE | WRITE_ZEROES | WRITE_IF)
            && entry.cdw12.get() & DIRECTIVE_TYPE != 0;
        if directive || entry.cdw12.get() & PROTECTION_INFORMATION != 0 {
            return Err(Status::INVALID_FIELD.final_());
        }
        let blocks = u64::from(entry.block_count());
        let moves = entry.transfer_direction() != Transfer::None;
        if moves && blocks * of.block_bytes as u64 > self.transfer_max as u64 {
            return Err(Status::INVALID_FIELD.final_());
        }
        let end = entry.start_lba.get().checked_add(blocks);
        if end.is_none_or(|end| end > of.block_count) {
            return Err(Status::LBA_OUT_OF_RANGE.final_());
        }
        Ok(())
    }

    /// Minimum and maximum bytes that may move.
    fn data_bytes(
        &self,
        entry: &SubmissionEntry,
        of: &NamespaceFormat,
    ) -> Result<(u64, u64), Status> {
        let exactly = |bytes: u64| Ok((bytes, bytes));
        match entry.opcode {
            DATASET_MANAGEMENT => {
                // Hosts may send a longer buffer than the list needs; the rest is ignored.
                let ranges = (entry.start_lba.get() & 0xff) + 1;
                Ok((ranges * RANGE_BYTES as u64, (RANGES_MAX * RANGE_BYTES) as u64))
            }
            RESERVATION_REGISTER | RESERVATION_ACQUIRE => exactly(TWO_KEYS_BYTES),
            RESERVATION_RELEASE => exactly(ONE_KEY_BYTES),
            RESERVATION_REPORT => {
                let bytes = ((entry.start_lba.get() & u64::from(u32::MAX)) + 1) * 4;
                if bytes > self.transfer_max as u64 {
                    return Err(Status::INVALID_FIELD.final_());
                }
                exactly(bytes)
            }
            READ | WRITE | COMPARE | WRITE_IF => {
                exactly(u64::from(entry.block_count()) * of.block_bytes as u64)
            }
            FLUSH_MILESTONE | OUTCOMES | OPENINGS => exactly(of.block_bytes as u64),
            _ => exactly(0),
        }
    }

    fn check_data_pointer(
        &self,
        entry: &SubmissionEntry,
        carried: u64,
        from_host: bool,
        least: u64,
        most: u64,
    ) -> Result<(), Status> {
        let length = u64::from(entry.sgl.length.get());
        // A list is authenticated together with its command, so on a secure queue both are in one
        // capsule.
        let in_capsule_only = self.is_secure && entry.opcode == DATASET_MANAGEMENT;
        match entry.sgl.kind {
            SGL_IN_CAPSULE if from_host => {
                if entry.sgl.address.get() != 0 {
                    return Err(Status::SGL_OFFSET_INVALID.final_());
                }
                if carried != length {
                    return Err(Status::SGL_LENGTH_INVALID.final_());
                }
            }
            SGL_TRANSPORT if !in_capsule_only => {
                if entry.sgl.address.get() != 0 {
                    return Err(Status::INVALID_FIELD.final_());
                }
                if carried != 0 {
                    return Err(Status::SGL_LENGTH_INVALID.final_());
                }
            }
            _ => return Err(Status::SGL_TYPE_INVALID.final_()),
        }
        if (least..=most).contains(&length) {
            Ok(())
        } else {
            Err(Status::SGL_LENGTH_INVALID.final_())
        }
    }

    /// The operation of a checked command with all its data; `None` for a dataset management
    /// command without the deallocate attribute, which is only a hint.
    pub(super) fn operation(
        &self,
        entry: &SubmissionEntry,
        data: Vec<u8>,
    ) -> Result<Option<Operation>, Status> {
        let cdw10 = entry.start_lba.get() as u32;
        let cdw11 = (entry.start_lba.get() >> 32) as u32;
        Ok(Some(match entry.opcode {
            READ => Operation::Read,
            WRITE => Operation::Write(data),
            COMPARE => Operation::Compare(data),
            WRITE_IF => Operation::WriteIf(data),
            VERIFY => Operation::Verify,
            FLUSH => Operation::Flush,
            FLUSH_MILESTONE => Operation::FlushMilestone,
            OPENINGS => Operation::Openings,
            OUTCOMES => Operation::Outcomes {
                queue: entry.start_lba.get(),
                epoch: u64::from(entry.cdw13.get()) << 32 | u64::from(entry.cdw12.get()),
            },
            WRITE_ZEROES => {
                Operation::WriteZeroes { deallocate: entry.cdw12.get() & DEALLOCATE_BIT != 0 }
            }
            DATASET_MANAGEMENT => {
                let ranges = self.ranges(entry, &data)?;
                if entry.start_lba.get() & DEALLOCATE_ATTRIBUTE == 0 {
                    return Ok(None);
                }
                Operation::Deallocate(ranges)
            }
            RESERVATION_REPORT => Operation::ReservationReport {
                extended: cdw11 & 1 != 0,
                bytes: entry.sgl.length.get() as usize,
            },
            RESERVATION_REGISTER => register(cdw10, &data)?,
            RESERVATION_ACQUIRE => acquire(cdw10, &data)?,
            RESERVATION_RELEASE => release(cdw10, &data)?,
            _ => return Err(Status::INVALID_OPCODE.final_()),
        }))
    }

    fn ranges(&self, entry: &SubmissionEntry, list: &[u8]) -> Result<Vec<LbaRange>, Status> {
        let count = (entry.start_lba.get() & 0xff) as usize + 1;
        let nsid = entry.nsid.get();
        let of = self.namespaces.iter().find(|known| known.nsid == nsid);
        let block_count = of.ok_or(Status::INVALID_NAMESPACE.final_())?.block_count;
        let mut ranges = Vec::with_capacity(count);
        for range in list.as_chunks::<RANGE_BYTES>().0.iter().take(count) {
            let [_, _, _, _, b0, b1, b2, b3, lba @ ..] = *range;
            let range = LbaRange {
                lba: u64::from_le_bytes(lba),
                blocks: u32::from_le_bytes([b0, b1, b2, b3]),
            };
            let end = range.lba.checked_add(u64::from(range.blocks));
            if end.is_none_or(|end| end > block_count) {
                return Err(Status::LBA_OUT_OF_RANGE.final_());
            }
            ranges.push(range);
        }
        Ok(ranges)
    }
}

fn changes_blocks(entry: &SubmissionEntry) -> bool {
    matches!(entry.opcode, WRITE | WRITE_ZEROES | DATASET_MANAGEMENT | WRITE_IF)
}

/// Checks a fused operation: Compare first, Write second, no more blocks than are written
/// atomically.
fn check_fused(entry: &SubmissionEntry, namespace: &NamespaceFormat) -> Result<(), Status> {
    use super::command::{FUSED_FIRST, FUSED_SECOND};
    let is_pair = match entry.flags & FUSED {
        0 => return Ok(()),
        FUSED_FIRST => entry.opcode == COMPARE,
        FUSED_SECOND => entry.opcode == WRITE,
        _ => false,
    };
    if !is_pair || !namespace.commands.contains(CommandSet::FUSED) {
        return Err(Status::INVALID_FIELD.final_());
    }
    if entry.block_count() > FUSED_BLOCKS_MAX {
        return Err(Status::ATOMIC_WRITE_UNIT_EXCEEDED.final_());
    }
    Ok(())
}

/// The `index`-th key of a reservation command's data.
fn key(data: &[u8], index: usize) -> Result<u64, Status> {
    let keys = data.as_chunks::<8>().0;
    keys.get(index).map(|key| u64::from_le_bytes(*key)).ok_or(Status::SGL_LENGTH_INVALID.final_())
}

fn register(cdw10: u32, data: &[u8]) -> Result<Operation, Status> {
    Ok(Operation::ReservationRegister {
        action: match cdw10 & 7 {
            0 => RegisterAction::Register,
            1 => RegisterAction::Unregister,
            2 => RegisterAction::Replace,
            _ => return Err(Status::INVALID_FIELD.final_()),
        },
        ignore_existing_key: cdw10 & IGNORE_EXISTING_KEY != 0,
        persistence: match cdw10 >> 30 {
            0 => Persistence::Unchanged,
            2 => Persistence::Clear,
            3 => Persistence::Set,
            _ => return Err(Status::INVALID_FIELD.final_()),
        },
        current_key: key(data, 0)?,
        new_key: key(data, 1)?,
    })
}

fn reservation_type(cdw10: u32) -> Result<ReservationType, Status> {
    ReservationType::from_value((cdw10 >> 8) as u8).ok_or(Status::INVALID_FIELD.final_())
}

fn acquire(cdw10: u32, data: &[u8]) -> Result<Operation, Status> {
    let action = match cdw10 & (7 | IGNORE_EXISTING_KEY) {
        0 => AcquireAction::Acquire,
        1 => AcquireAction::Preempt,
        2 => AcquireAction::PreemptAndAbort,
        _ => return Err(Status::INVALID_FIELD.final_()),
    };
    let kind = reservation_type(cdw10)?;
    let (current_key, preempt_key) = (key(data, 0)?, key(data, 1)?);
    Ok(Operation::ReservationAcquire { action, kind, current_key, preempt_key })
}

fn release(cdw10: u32, data: &[u8]) -> Result<Operation, Status> {
    let kind = match cdw10 & (7 | IGNORE_EXISTING_KEY) {
        0 => Some(reservation_type(cdw10)?),
        1 => None,
        _ => return Err(Status::INVALID_FIELD.final_()),
    };
    Ok(Operation::ReservationRelease { kind, current_key: key(data, 0)? })
}
