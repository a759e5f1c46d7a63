//! What a sealed store lies on: pages that are read and written by several threads at a time.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::pages::{BlockFile, DeviceFile, Page};
use super::ring::{Ended, Io, Ring};

/// A part of an operation of a channel: which, and its first block there.
#[derive(Debug)]
pub struct Piece {
    /// The channel's number of the operation.
    pub operation: u64,
    /// First block of the piece, from the operation's first.
    pub first: usize,
}

/// Operations of one channel on a device: started in batches, ended through an event descriptor.
pub trait IoQueue: Send {
    /// Prepares an operation; [`IoQueue::turn`] starts it.
    fn push(&mut self, piece: Piece, io: Io);
    /// Starts what was prepared and moves what has ended to `ended`. Never blocks. After an error
    /// nothing more will end.
    fn turn(&mut self, ended: &mut Vec<Ended<Piece>>) -> io::Result<()>;
    /// Gives up what wasn't started and waits until the rest has ended. False: that can't be
    /// waited for, and the device may still use the buffers.
    fn drain(&mut self) -> bool;
    /// A buffer of `count` pages of any contents.
    fn buffer(&mut self, count: usize) -> Vec<Page>;
    /// Gives a buffer back for later operations.
    fn keep(&mut self, pages: Vec<Page>);
}

/// Where a sealed store's pages are.
pub trait Device: BlockFile {
    /// Pages that it has.
    fn page_count(&self) -> u64;
    /// Gives it so many pages at least, where it can grow. `StorageFull` if it has fewer and can't.
    fn extend(&self, page_count: u64) -> io::Result<()> {
        check_room(self.page_count(), page_count)
    }
    /// A queue for one channel. The event descriptor becomes readable with every end.
    fn queue(self: Arc<Self>, event: Arc<OwnedFd>) -> io::Result<Box<dyn IoQueue>>;
}

/// Refuses a device with fewer pages than a store takes.
pub fn check_room(found: u64, needed: u64) -> io::Result<()> {
    if found >= needed {
        return Ok(());
    }
    let detail = format!("the device has {found} pages of 4096 bytes, the store takes {needed}");
    Err(io::Error::new(io::ErrorKind::StorageFull, detail))
}

impl Device for DeviceFile {
    fn page_count(&self) -> u64 {
        DeviceFile::page_count(self)
    }

    fn extend(&self, page_count: u64) -> io::Result<()> {
        DeviceFile::extend(self, page_count)
    }

    fn queue(self: Arc<Self>, event: Arc<OwnedFd>) -> io::Result<Box<dyn IoQueue>> {
        Ok(Box::new(Ring::new(self, event)?))
    }
}

impl IoQueue for Ring<Piece> {
    fn push(&mut self, piece: Piece, io: Io) {
        Ring::push(self, piece, io);
    }

    fn turn(&mut self, ended: &mut Vec<Ended<Piece>>) -> io::Result<()> {
        Ring::turn(self, ended)
    }

    fn drain(&mut self) -> bool {
        Ring::drain(self)
    }

    fn buffer(&mut self, count: usize) -> Vec<Page> {
        Ring::buffer(self, count)
    }

    fn keep(&mut self, pages: Vec<Page>) {
        Ring::keep(self, pages);
    }
}
