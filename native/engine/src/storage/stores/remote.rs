//! Pages on a third party's plain namespace.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::event::PollFlags;
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::host_queue::{HostLimits, HostQueue};
use zerocopy::IntoBytes;

use super::super::connection::wait;
use super::device::{Device, IoQueue, Piece};
use super::pages::{BlockFile, IO_PAGES_MAX, PAGE_BYTES, Page};
use super::remote_link::{Link, Transfer};
use super::ring::{Ended, Io, clear, signal};

/// Most buffers that a queue keeps for later operations.
const POOL_BUFFERS: usize = 64;

/// An operation on pages, and the number of the namespace's blocks in a page.
struct PageIo {
    io: Io,
    blocks_per_page: u64,
}

impl Transfer for PageIo {
    const UNIT_BYTES: usize = PAGE_BYTES;

    fn units(&self) -> usize {
        match &self.io {
            Io::Read(_, pages) | Io::Write(_, pages, _) => pages.len(),
            Io::Sync | Io::Punch(..) => 1,
        }
    }

    fn command(&self, first: usize, pages: usize, queue: &mut HostQueue) -> Option<HostCommand> {
        let lba = |page: u64| (page + first as u64) * self.blocks_per_page;
        Some(match &self.io {
            Io::Read(page, _) => {
                let blocks = (pages as u64 * self.blocks_per_page) as u32;
                HostCommand::Read { lba: lba(*page), blocks }
            }
            Io::Write(page, all, is_durable) => {
                let part = all.get(first..first + pages).unwrap_or_default().as_bytes();
                let mut data = queue.buffer(part.len());
                data.copy_from_slice(part);
                HostCommand::Write { lba: lba(*page), data, is_forced: *is_durable }
            }
            Io::Sync => HostCommand::Flush,
            Io::Punch(..) => return None,
        })
    }

    fn is_read(&self) -> bool {
        matches!(self.io, Io::Read(..))
    }

    fn place(&mut self) -> &mut [u8] {
        match &mut self.io {
            Io::Read(_, pages) => pages.as_mut_bytes(),
            _ => &mut [],
        }
    }
}

/// The namespace as a device of pages.
pub struct RemoteDevice {
    link: Link<PageIo>,
    page_count: u64,
    blocks_per_page: u64,
}

impl std::fmt::Debug for RemoteDevice {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let page_count = self.page_count;
        formatter
            .debug_struct("RemoteDevice")
            .field("page_count", &page_count)
            .finish_non_exhaustive()
    }
}

impl RemoteDevice {
    /// Starts a device on a connected socket whose Connect command succeeded, for a namespace of
    /// `block_count` blocks. A command may take `timeout`. `InvalidInput` unless the block size is a
    /// power of two from 512 to 4096.
    pub fn start(
        fd: OwnedFd,
        limits: HostLimits,
        block_count: u64,
        timeout: Duration,
    ) -> io::Result<Self> {
        let block_bytes = limits.block_bytes;
        if !block_bytes.is_power_of_two() || !(512..=PAGE_BYTES).contains(&block_bytes) {
            let detail =
                format!("blocks of {block_bytes} bytes; allowed: 512 to 4096, powers of 2");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, detail));
        }
        let blocks_per_page = (PAGE_BYTES / block_bytes) as u64;
        let link = Link::start(fd, limits, IO_PAGES_MAX, timeout)?;
        Ok(Self { link, page_count: block_count / blocks_per_page, blocks_per_page })
    }

    fn execute(&self, io: Io) -> io::Result<Io> {
        let blocks_per_page = self.blocks_per_page;
        Ok(self.link.execute(PageIo { io, blocks_per_page })?.io)
    }
}

impl BlockFile for RemoteDevice {
    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()> {
        for (page, pages) in (page..).step_by(IO_PAGES_MAX).zip(pages.chunks_mut(IO_PAGES_MAX)) {
            let Io::Read(_, found) = self.execute(Io::Read(page, pages.to_vec()))? else {
                return Err(io::Error::other("a read was returned as another operation"));
            };
            pages.copy_from_slice(&found);
        }
        Ok(())
    }

    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        for (page, pages) in (page..).step_by(IO_PAGES_MAX).zip(pages.chunks(IO_PAGES_MAX)) {
            self.execute(Io::Write(page, pages.to_vec(), false))?;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.execute(Io::Sync).map(drop)
    }
}

impl Device for RemoteDevice {
    fn page_count(&self) -> u64 {
        self.page_count
    }

    fn queue(self: Arc<Self>, event: Arc<OwnedFd>) -> io::Result<Box<dyn IoQueue>> {
        let outbox = Arc::new(Outbox { ended: Mutex::default(), event });
        let (flying, pool) = (0, Vec::new());
        Ok(Box::new(RemoteQueue { device: self, outbox, flying, pool }))
    }
}

/// Where a channel finds its completed operations.
struct Outbox {
    ended: Mutex<Vec<Ended<Piece>>>,
    event: Arc<OwnedFd>,
}

struct RemoteQueue {
    device: Arc<RemoteDevice>,
    outbox: Arc<Outbox>,
    flying: usize,
    pool: Vec<Vec<Page>>,
}

impl IoQueue for RemoteQueue {
    fn push(&mut self, piece: Piece, io: Io) {
        self.flying += 1;
        let outbox = Arc::clone(&self.outbox);
        let reply = move |PageIo { io, .. }, result| {
            let mut ended = outbox.ended.lock().unwrap_or_else(PoisonError::into_inner);
            ended.push(Ended { tag: piece, io, result });
            signal(&outbox.event);
        };
        let blocks_per_page = self.device.blocks_per_page;
        self.device.link.give(PageIo { io, blocks_per_page }, Box::new(reply));
    }

    fn turn(&mut self, ended: &mut Vec<Ended<Piece>>) -> io::Result<()> {
        let mut found = self.outbox.ended.lock().unwrap_or_else(PoisonError::into_inner);
        self.flying -= found.len();
        ended.append(&mut found);
        Ok(())
    }

    fn drain(&mut self) -> bool {
        let mut ended = Vec::new();
        loop {
            clear(&self.outbox.event);
            if self.turn(&mut ended).is_err() {
                return false;
            }
            if self.flying == 0 {
                return true;
            }
            if wait([(self.outbox.event.as_fd(), PollFlags::IN)], None).is_err() {
                return false;
            }
        }
    }

    fn buffer(&mut self, count: usize) -> Vec<Page> {
        let mut pages = self.pool.pop().unwrap_or_default();
        pages.resize(count, Page::ZERO);
        pages
    }

    fn keep(&mut self, pages: Vec<Page>) {
        if self.pool.len() < POOL_BUFFERS && pages.capacity() <= IO_PAGES_MAX {
            self.pool.push(pages);
        }
    }
}

#[cfg(test)]
#[path = "remote_tests.rs"]
mod tests;
