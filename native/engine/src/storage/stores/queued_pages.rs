//! Pages of a device for callers that may block. Reads and writes of scattered pages run in
//! parallel, on a queue of their own.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::PollFlags;

use super::super::connection::wait;
use super::device::{Device, IoQueue, Piece};
use super::pages::{BlockFile, Page, runs};
use super::ring::{Io, clear, event};

struct Queue {
    io: Box<dyn IoQueue>,
    event: Arc<OwnedFd>,
}

/// Pages of a device, read and written through one queue.
pub struct QueuedPages {
    device: Arc<dyn Device>,
    queue: Mutex<Queue>,
}

impl std::fmt::Debug for QueuedPages {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("QueuedPages").field("device", &self.device).finish_non_exhaustive()
    }
}

impl QueuedPages {
    /// Opens a queue on a device.
    pub fn new(device: Arc<dyn Device>) -> io::Result<Self> {
        let event = event()?;
        let queue = Queue { io: Arc::clone(&device).queue(Arc::clone(&event))?, event };
        Ok(Self { device, queue: Mutex::new(queue) })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    /// Waits for `count` operations and passes what was read to `read`, with the index of its first
    /// page.
    fn finish(&mut self, count: usize, mut read: impl FnMut(usize, &[Page])) -> io::Result<()> {
        let mut ended = Vec::with_capacity(count);
        let mut left = count;
        let mut result = Ok(());
        while left > 0 {
            clear(&self.event);
            self.io.turn(&mut ended)?;
            if ended.is_empty() {
                wait([(self.event.as_fd(), PollFlags::IN)], None)?;
            }
            left -= ended.len();
            for ended in ended.drain(..) {
                match (ended.result, &ended.io) {
                    (Err(error), _) => result = Err(error),
                    (Ok(()), Io::Read(_, pages)) => read(ended.tag.first, pages),
                    _ => {}
                }
                if let Io::Read(_, pages) | Io::Write(_, pages, _) = ended.io {
                    self.io.keep(pages);
                }
            }
        }
        result
    }

    /// Starts operations for the runs in `places` and returns their number. `io` makes an operation
    /// from a run's first place, the index of its first page, and its buffer.
    fn start(&mut self, places: &[u64], io: impl Fn(u64, usize, Vec<Page>) -> Io) -> usize {
        let (mut first, mut count) = (0, 0);
        for run in runs(places) {
            let buffer = self.io.buffer(run.len());
            self.io.push(Piece { operation: 0, first }, io(run[0], first, buffer));
            first += run.len();
            count += 1;
        }
        count
    }
}

impl BlockFile for QueuedPages {
    fn reserve(&self, pages: Range<u64>) -> io::Result<()> {
        self.device.reserve(pages)
    }

    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()> {
        self.device.read(page, pages)
    }

    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.device.write(page, pages)
    }

    fn sync(&self) -> io::Result<()> {
        self.device.sync()
    }

    fn read_each(&self, places: &[u64], pages: &mut [Page]) -> io::Result<()> {
        let mut queue = self.queue();
        let count = queue.start(places, |place, _, buffer| Io::Read(place, buffer));
        queue.finish(count, |first, found| {
            pages[first..first + found.len()].copy_from_slice(found);
        })
    }

    fn write_each(&self, places: &[u64], pages: &[Page]) -> io::Result<()> {
        let mut queue = self.queue();
        let count = queue.start(places, |place, first, mut buffer| {
            let run = first..first + buffer.len();
            buffer.copy_from_slice(&pages[run]);
            Io::Write(place, buffer, false)
        });
        queue.finish(count, |_, _| {})
    }
}

#[cfg(test)]
mod tests {
    use super::super::pages::DeviceFile;
    use super::super::scratch::Scratch;
    use super::*;

    fn page(number: u64) -> Page {
        let mut page = Page::ZERO;
        page.0[..8].copy_from_slice(&number.to_le_bytes());
        page
    }

    #[test]
    fn each_page_goes_to_its_place_and_comes_from_it() {
        let scratch = Scratch::new();
        let device = DeviceFile::create(&scratch.file(), 2000).expect("file");
        let pages = QueuedPages::new(Arc::new(device)).expect("pages");
        // More runs than the ring accepts; some longer than one page, one longer than an operation
        // may be.
        let places: Vec<u64> = (0..600).filter(|place| place % 3 > 0).chain(1000..1700).collect();
        let written: Vec<Page> = places.iter().map(|place| page(*place)).collect();
        pages.write_each(&places, &written).expect("write");
        let mut found = vec![Page::ZERO; places.len()];
        pages.read_each(&places, &mut found).expect("read");
        assert_eq!(found, written);
        let mut between = [page(1)];
        pages.read(999, &mut between).expect("read");
        assert_eq!(between, [Page::ZERO]);
        pages.read_each(&[], &mut []).expect("nothing");
    }

    #[test]
    fn one_failed_page_fails_all_and_the_queue_goes_on() {
        let scratch = Scratch::new();
        let device = DeviceFile::create(&scratch.file(), 10).expect("file");
        let pages = QueuedPages::new(Arc::new(device)).expect("pages");
        let mut found = [Page::ZERO; 2];
        pages.read_each(&[3, 90], &mut found).expect_err("beyond the end");
        pages.read_each(&[3, 9], &mut found).expect("read");
    }
}
