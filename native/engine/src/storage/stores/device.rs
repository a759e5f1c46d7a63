//! The device of a sealed store: pages that several threads read and write concurrently.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::pages::{BlockFile, DeviceFile, Page};
use super::ring::{Ended, Io, Ring};

/// One I/O of a channel's operation.
#[derive(Debug)]
pub struct Piece {
    /// The channel's number of the operation.
    pub operation: u64,
    /// Index of the piece's first block in the operation.
    pub first: usize,
}

/// I/O of one channel on a device: submitted in batches; completions signal an event descriptor.
pub trait IoQueue: Send {
    /// Prepares an I/O; [`IoQueue::turn`] starts it.
    fn push(&mut self, piece: Piece, io: Io);
    /// Starts prepared I/O and moves completions to `ended`. Never blocks. After an error, nothing
    /// more completes.
    fn turn(&mut self, ended: &mut Vec<Ended<Piece>>) -> io::Result<()>;
    /// Drops I/O that was not started and waits until the rest has completed. Returns false if
    /// waiting fails: then the device may still use the buffers.
    fn drain(&mut self) -> bool;
    /// A buffer of `count` pages with unspecified contents.
    fn buffer(&mut self, count: usize) -> Vec<Page>;
    /// Returns a buffer for later operations.
    fn keep(&mut self, pages: Vec<Page>);
}

/// A device of pages for sealed stores.
pub trait Device: BlockFile {
    /// Number of pages.
    fn page_count(&self) -> u64;
    /// Extends the device to at least `page_count` pages. `StorageFull` if it has fewer and can't
    /// grow.
    fn extend(&self, page_count: u64) -> io::Result<()> {
        check_room(self.page_count(), page_count)
    }
    /// Opens a queue for one channel. Every completion signals `event`.
    fn queue(self: Arc<Self>, event: Arc<OwnedFd>) -> io::Result<Box<dyn IoQueue>>;
}

/// Refuses a device with fewer pages than a store needs.
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
