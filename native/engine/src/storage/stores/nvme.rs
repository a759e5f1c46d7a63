//! Sealed blocks on a drive formatted with 4096 bytes of data and 64 of metadata, through the
//! kernel's io_uring passthrough (`/dev/ngXnY`). No copy: the drive moves the caller's blocks.
//!
//! A power cut leaves each block's data and metadata together old or new (NVM Command Set §2.1.4,
//! AWUPF of at least one block).

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;

use io_uring::{cqueue, opcode, squeue, types};
use rustix::ioctl;

use super::super::store::{
    BLOCK_BYTES, BlockStore, DATA_BYTES, StoreChannel, StoreCounters, StoreDone, StoreRequest,
};
use super::fresh::failure::copy_error;
use super::fresh_store::in_use;
use super::nvme_command::{
    IDENTIFY_BYTES, Passthrough, ZEROES_BLOCKS_MAX, check_namespace, transfer_blocks,
};
use super::pages::lock;
use super::ring::{Ended, Job, Ring, clear, event, signal};

/// Most blocks of a command, if the drive allows them: 512 KiB, which every kernel maps.
const TRANSFER_BLOCKS_MAX: u64 = 126;
/// `NVME_IOCTL_ID`: the namespace's identifier, as the ioctl's result.
const IOCTL_ID: ioctl::Opcode = ioctl::opcode::none(b'N', 0x40);
/// `NVME_IOCTL_ADMIN_CMD`.
const IOCTL_ADMIN: ioctl::Opcode = ioctl::opcode::read_write::<Passthrough>(b'N', 0x41);
/// `NVME_URING_CMD_IO`.
const URING_IO: ioctl::Opcode = ioctl::opcode::read_write::<Passthrough>(b'N', 0x80);

#[derive(Debug)]
struct Shared {
    device: Arc<File>,
    nsid: u32,
    block_count: u64,
    transfer_blocks: u64,
    counters: StoreCounters,
}

/// A drive with 64 bytes of metadata.
#[derive(Debug)]
pub struct NvmeStore {
    shared: Arc<Shared>,
}

struct IdentifierIoctl;

// SAFETY: NVME_IOCTL_ID takes no argument and returns the identifier.
unsafe impl ioctl::Ioctl for IdentifierIoctl {
    type Output = u32;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> ioctl::Opcode {
        IOCTL_ID
    }

    fn as_ptr(&mut self) -> *mut core::ffi::c_void {
        core::ptr::null_mut()
    }

    unsafe fn output_from_ptr(
        output: ioctl::IoctlOutput,
        _: *mut core::ffi::c_void,
    ) -> rustix::io::Result<u32> {
        Ok(output.cast_unsigned())
    }
}

fn identify(device: &File, nsid: u32, cns: u8) -> io::Result<Box<[u8; IDENTIFY_BYTES]>> {
    let mut data = Box::new([0; IDENTIFY_BYTES]);
    let mut command = Passthrough::identify(nsid, cns, data.as_mut_ptr() as u64);
    // SAFETY: the structure is the one of this ioctl (linux/nvme_ioctl.h), and identify writes
    // 4096 bytes to the address in it, where `data` is.
    unsafe { ioctl::ioctl(device, ioctl::Updater::<IOCTL_ADMIN, Passthrough>::new(&mut command))? };
    Ok(data)
}

impl NvmeStore {
    /// Opens a generic namespace device, which must be formatted with 4096 + 64 bytes, as a store
    /// of its first `block_count` blocks. Their contents stay.
    pub fn open(path: &Path, block_count: u64) -> io::Result<Self> {
        let whole = Self::open_whole(path)?;
        let found = whole.shared.block_count;
        if found < block_count {
            let detail = format!("{} has {found} blocks of {block_count}", path.display());
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, detail));
        }
        whole.of(block_count)
    }

    fn of(mut self, block_count: u64) -> io::Result<Self> {
        Arc::get_mut(&mut self.shared).ok_or_else(in_use)?.block_count = block_count;
        Ok(self)
    }

    /// Opens the device with all of its blocks.
    pub fn open_whole(path: &Path) -> io::Result<Self> {
        let device = OpenOptions::new().read(true).write(true).open(path)?;
        lock(&device)?;
        // SAFETY: see `IdentifierIoctl`.
        let nsid = unsafe { ioctl::ioctl(&device, IdentifierIoctl)? };
        let block_count = check_namespace(&*identify(&device, nsid, 0)?)?;
        let controller = identify(&device, nsid, 1)?;
        let shared = Shared {
            device: Arc::new(device),
            nsid,
            block_count,
            transfer_blocks: transfer_blocks(&controller, TRANSFER_BLOCKS_MAX),
            counters: StoreCounters::default(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns the number of blocks of an unused namespace, and whether the data of the first one
    /// are zeros: if not, they may be somebody's.
    pub fn examine(path: &Path) -> io::Result<(u64, bool)> {
        let store = Self::open_whole(path)?;
        let read = StoreRequest::Read { lba: 0, buffer: vec![0; BLOCK_BYTES] };
        let first = wait(&mut store.channel()?, read)?;
        Ok((store.shared.block_count, first.iter().take(DATA_BYTES).all(|byte| *byte == 0)))
    }

    /// Deallocates the first block, where a store begins: afterwards nothing refers to the store.
    pub fn erase(path: &Path) -> io::Result<()> {
        let store = Self::open_whole(path)?;
        let mut channel = store.channel()?;
        wait(&mut channel, StoreRequest::Deallocate { lba: 0, blocks: 1 })?;
        wait(&mut channel, StoreRequest::Flush).map(drop)
    }

    /// Opens the device and deallocates all blocks: what the drive held is lost.
    pub fn create(path: &Path, block_count: u64) -> io::Result<Self> {
        let store = Self::open(path, block_count)?;
        let mut channel = store.channel()?;
        wait(&mut channel, StoreRequest::Deallocate { lba: 0, blocks: block_count })?;
        wait(&mut channel, StoreRequest::Flush)?;
        Ok(store)
    }

    fn channel(&self) -> io::Result<NvmeChannel> {
        Ok(NvmeChannel {
            ring: Ring::new(Arc::clone(&self.shared.device) as Arc<_>, event()?)?,
            shared: Arc::clone(&self.shared),
            operations: HashMap::new(),
            next: 0,
            done: Vec::new(),
        })
    }
}

/// Executes one operation on a channel that has no other.
fn wait(channel: &mut NvmeChannel, request: StoreRequest) -> io::Result<Vec<u8>> {
    use rustix::event::{PollFd, PollFlags, poll};
    channel.submit(0, request);
    let mut done = Vec::new();
    loop {
        channel.poll(&mut done);
        if let Some(StoreDone { result, buffer, .. }) = done.pop() {
            return result.map(|()| buffer);
        }
        poll(&mut [PollFd::new(channel.ring.event(), PollFlags::IN)], None)?;
    }
}

impl BlockStore for NvmeStore {
    fn block_bytes(&self) -> usize {
        BLOCK_BYTES
    }

    fn block_count(&self) -> u64 {
        self.shared.block_count
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        Ok(Box::new(self.channel()?))
    }

    /// The namespace must have that many blocks; it may have grown since it was opened.
    fn extend(&mut self, block_count: u64) -> io::Result<()> {
        let shared = Arc::get_mut(&mut self.shared).ok_or_else(in_use)?;
        let found = check_namespace(&*identify(&shared.device, shared.nsid, 0)?)?;
        if found < block_count {
            let detail = format!("the namespace has {found} blocks, the store takes {block_count}");
            return Err(io::Error::new(io::ErrorKind::StorageFull, detail));
        }
        shared.block_count = shared.block_count.max(block_count);
        Ok(())
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        self.shared.counters.by_name()
    }
}

/// One command of an operation, with the operation's buffer. An operation's commands run one after
/// the other.
struct NvmeJob {
    command: Passthrough,
    buffer: Vec<u8>,
    /// Where in the buffer the command's data starts.
    start: usize,
}

// SAFETY: the only memory named is that of `buffer`, within its length (`NvmeChannel::push`).
unsafe impl Job for NvmeJob {
    type Submission = squeue::Entry128;
    type Completion = cqueue::Entry32;

    fn entry(&mut self, fd: types::Fd, user_data: u64) -> squeue::Entry128 {
        if self.command.data_bytes > 0 {
            let data = &mut self.buffer[self.start..][..self.command.data_bytes as usize];
            self.command.address = data.as_mut_ptr() as u64;
        }
        let command = opcode::UringCmd80::new(fd, URING_IO).cmd(self.command.to_bytes());
        command.build().user_data(user_data)
    }

    fn outcome(&self, result: i32) -> io::Result<()> {
        match u16::try_from(result) {
            Ok(0) => Ok(()),
            // The status field of the completion without its phase bit.
            Ok(status) => Err(io::Error::other(format!("the drive answered status {status:#06x}"))),
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
        }
    }
}

/// The rest of an operation after its command in progress.
struct Operation {
    ticket: u64,
    request: StoreRequest,
    rest: VecDeque<(u64, u64)>,
    start: usize,
}

struct NvmeChannel {
    shared: Arc<Shared>,
    ring: Ring<u64, NvmeJob>,
    operations: HashMap<u64, Operation>,
    next: u64,
    done: Vec<StoreDone>,
}

/// Splits a range into the ranges of single commands.
fn parts(lba: u64, blocks: u64, most: u64) -> VecDeque<(u64, u64)> {
    let starts = (0..blocks).step_by(most as usize);
    starts.map(|start| (lba + start, most.min(blocks - start))).collect()
}

impl NvmeChannel {
    /// Pushes the next command of an operation, or completes the operation.
    fn push(&mut self, id: u64, mut operation: Operation, buffer: Vec<u8>) {
        let nsid = self.shared.nsid;
        let Some((lba, blocks)) = operation.rest.pop_front() else {
            self.end(operation, Ok(()), buffer);
            return;
        };
        let command = match &operation.request {
            StoreRequest::Read { .. } => Passthrough::read(nsid, lba, blocks, 0),
            StoreRequest::Write { durable, .. } => {
                Passthrough::write(nsid, lba, blocks, *durable, 0)
            }
            StoreRequest::Flush => Passthrough::flush(nsid),
            StoreRequest::Deallocate { .. } => Passthrough::write_zeroes(nsid, lba, blocks),
        };
        let start = operation.start;
        operation.start += command.data_bytes as usize;
        self.ring.push(id, NvmeJob { command, buffer, start });
        self.operations.insert(id, operation);
    }

    fn ended(&mut self, ended: Ended<u64, NvmeJob>) {
        let Ended { tag: id, io: NvmeJob { buffer, .. }, result } = ended;
        let Some(operation) = self.operations.remove(&id) else { return };
        match result {
            Ok(()) => self.push(id, operation, buffer),
            Err(error) => self.end(operation, Err(error), buffer),
        }
    }

    fn end(&mut self, operation: Operation, result: io::Result<()>, buffer: Vec<u8>) {
        let Operation { ticket, request, .. } = operation;
        let counters = &self.shared.counters;
        match (&request, &result) {
            (_, Err(_)) => counters.failed(),
            (StoreRequest::Read { .. }, _) => counters.read(buffer.len()),
            (StoreRequest::Write { .. }, _) => counters.written(buffer.len()),
            (StoreRequest::Flush, _) => counters.flushed(),
            (StoreRequest::Deallocate { .. }, _) => counters.deallocated(),
        }
        if self.done.is_empty() {
            signal(self.ring.event());
        }
        self.done.push(StoreDone { ticket, result, buffer });
    }
}

impl StoreChannel for NvmeChannel {
    fn submit(&mut self, ticket: u64, mut request: StoreRequest) {
        let checked = request.check(BLOCK_BYTES, self.shared.block_count);
        let most = self.shared.transfer_blocks;
        let (rest, buffer) = match &mut request {
            StoreRequest::Read { lba, buffer } | StoreRequest::Write { lba, buffer, .. } => {
                let blocks = (buffer.len() / BLOCK_BYTES) as u64;
                (parts(*lba, blocks, most), std::mem::take(buffer))
            }
            // Write Zeroes has a limit of its own (WZSL), which is rarely above MDTS: stay below
            // both.
            StoreRequest::Deallocate { lba, blocks } => {
                let most = if most == TRANSFER_BLOCKS_MAX { ZEROES_BLOCKS_MAX } else { most };
                (
                    if checked.is_ok() { parts(*lba, *blocks, most) } else { VecDeque::new() },
                    Vec::new(),
                )
            }
            StoreRequest::Flush => (VecDeque::from([(0, 1)]), Vec::new()),
        };
        let operation = Operation { ticket, request, rest, start: 0 };
        match checked {
            Ok(()) => {
                let id = self.next;
                self.next += 1;
                self.push(id, operation, buffer);
            }
            Err(error) => self.end(operation, Err(error), buffer),
        }
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        clear(self.ring.event());
        let mut ended = Vec::new();
        let mut turned = self.ring.turn(&mut ended);
        let has_ended = !ended.is_empty();
        for ended in ended {
            self.ended(ended);
        }
        if has_ended && turned.is_ok() {
            // Start the next commands of these operations.
            let mut ended = Vec::new();
            turned = self.ring.turn(&mut ended);
            for ended in ended {
                self.ended(ended);
                signal(self.ring.event());
            }
        }
        if let Err(error) = turned {
            for (_, operation) in std::mem::take(&mut self.operations) {
                self.end(operation, Err(copy_error(&error)), Vec::new());
            }
        }
        done.append(&mut self.done);
    }

    fn in_flight(&self) -> usize {
        self.operations.len() + self.done.len()
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ring.event().as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_split_where_commands_end() {
        assert_eq!(parts(5, 7, 3), [(5, 3), (8, 3), (11, 1)]);
        assert_eq!(parts(5, 0, 3), []);
    }

    #[test]
    fn entries_name_the_part_of_the_buffer_that_the_command_moves() {
        let command = Passthrough::read(1, 0, 2, 0);
        let mut job = NvmeJob { command, buffer: vec![0; 5 * BLOCK_BYTES], start: 3 * BLOCK_BYTES };
        let start = job.buffer.as_ptr() as u64;
        let _ = job.entry(types::Fd(0), 1);
        assert_eq!(job.command.address, start + 3 * BLOCK_BYTES as u64);
        assert!(job.outcome(0).is_ok());
        assert_eq!(job.outcome(-5).expect_err("error").raw_os_error(), Some(5));
        let error = job.outcome(0x0281).expect_err("error").to_string();
        assert!(error.contains("0x0281"), "{error}");
    }

    #[test]
    fn a_device_that_is_no_drive_is_refused() {
        let error = NvmeStore::open(Path::new("/dev/null"), 1).expect_err("no drive");
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::NOTTY.raw_os_error()));
    }
}

#[cfg(test)]
#[path = "nvme_drive_tests.rs"]
mod drive_tests;
