//! A plain namespace on a torn disk or in memory, served over a real socket by the target's own
//! queue threads. To the device it is a third party's.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use sealane_proto::nvme::controller_queue::ControllerLimits;
use sealane_proto::nvme::host_queue::HostLimits;
use sealane_proto::nvme::pdu::Digests;

use super::super::store::{BlockStore, StoreChannel, StoreDone, StoreRequest};
use super::super::target::{AnaState, Controller, Namespace};
use super::device::Device;
use super::pages::{BlockFile, PAGE_BYTES, Page};
use super::remote::RemoteDevice;
use super::torn_disk::TornDisk;
use zerocopy::IntoBytes;

const LIMITS: ControllerLimits = ControllerLimits {
    queue_depth: 32,
    h2c_data_max: 16_384,
    in_capsule_max: 8192,
    transfer_max: 65_536,
    success_flag: true,
    digests: Digests { header: true, data: true },
};

/// A device and the controller that serves its namespace.
#[derive(Debug)]
pub struct Served {
    pub device: Arc<RemoteDevice>,
    link: Link,
}

impl Served {
    /// Serves a store through a new association.
    pub fn new(store: Box<dyn BlockStore>) -> Self {
        let namespace = Arc::new(Namespace::new(store).expect("namespace"));
        Self::over(&namespace)
    }

    /// Serves a torn disk.
    pub fn disk(disk: &Arc<TornDisk>, page_count: u64) -> Self {
        Self::new(Box::new(TornStore { disk: Arc::clone(disk), page_count }))
    }

    /// Serves a namespace through a new association.
    pub fn over(namespace: &Arc<Namespace>) -> Self {
        let (host, limits, link) = Link::connect(namespace, PAGE_BYTES);
        let (count, timeout) = (namespace.block_count(), Duration::from_secs(20));
        let device = RemoteDevice::start(host, limits, count, timeout).expect("device");
        Self { device: Arc::new(device), link }
    }

    /// Breaks the connection.
    pub fn cut(&self) {
        self.link.cut();
    }

    /// A descriptor of the connection, for [`cut`].
    pub fn link(&self) -> OwnedFd {
        self.link.fd.try_clone().expect("descriptor")
    }
}

/// A connection to a controller, which lasts as long as this value.
#[derive(Debug)]
pub struct Link {
    fd: OwnedFd,
    _controller: Controller,
}

impl Link {
    /// Connects a queue to a namespace. Returns the host's socket and the limits for the host's
    /// queue.
    pub fn connect(namespace: &Arc<Namespace>, block_bytes: usize) -> (OwnedFd, HostLimits, Self) {
        let flags = SocketFlags::CLOEXEC;
        let (host, target) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("sockets");
        let fd = host.try_clone().expect("descriptor");
        let controller = Controller::new(1, [1; 16]).expect("controller");
        controller.set_namespaces(vec![(1, Arc::clone(namespace), AnaState::Optimized)]);
        controller.start_queue(target, 1, LIMITS, None).expect("queue");
        let limits = HostLimits {
            queue_depth: LIMITS.queue_depth,
            h2c_data_max: LIMITS.h2c_data_max,
            transfer_max: LIMITS.transfer_max,
            in_capsule_max: LIMITS.in_capsule_max,
            block_bytes,
            nsid: 1,
            digests: LIMITS.digests,
        };
        (host, limits, Self { fd, _controller: controller })
    }

    /// Breaks the connection.
    pub fn cut(&self) {
        cut(&self.fd);
    }
}

/// Breaks a connection. Idempotent.
pub fn cut(link: &OwnedFd) {
    // A second shutdown of the same socket fails, which is fine.
    let _ = shutdown(link, Shutdown::Both);
}

impl BlockFile for Served {
    fn read(&self, page: u64, pages: &mut [Page]) -> io::Result<()> {
        self.device.read(page, pages)
    }

    fn write(&self, page: u64, pages: &[Page]) -> io::Result<()> {
        self.device.write(page, pages)
    }

    fn sync(&self) -> io::Result<()> {
        self.device.sync()
    }
}

/// A torn disk as a plain store.
#[derive(Debug)]
struct TornStore {
    disk: Arc<TornDisk>,
    page_count: u64,
}

impl BlockStore for TornStore {
    fn block_bytes(&self) -> usize {
        PAGE_BYTES
    }

    fn block_count(&self) -> u64 {
        self.page_count
    }

    fn open(&self) -> io::Result<Box<dyn StoreChannel>> {
        Ok(Box::new(TornChannel { disk: Arc::clone(&self.disk), done: Vec::new() }))
    }

    fn statistics(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

struct TornChannel {
    disk: Arc<TornDisk>,
    done: Vec<StoreDone>,
}

impl StoreChannel for TornChannel {
    fn submit(&mut self, ticket: u64, mut request: StoreRequest) {
        let result = match &mut request {
            StoreRequest::Read { lba, buffer } => {
                let mut pages = vec![Page::ZERO; buffer.len() / PAGE_BYTES];
                let read = self.disk.read(*lba, &mut pages);
                buffer.copy_from_slice(pages.as_bytes());
                read
            }
            StoreRequest::Write { lba, buffer, durable } => {
                let mut pages = vec![Page::ZERO; buffer.len() / PAGE_BYTES];
                pages.as_mut_bytes().copy_from_slice(buffer);
                let written = self.disk.write(*lba, &pages);
                if *durable { written.and_then(|()| self.disk.sync()) } else { written }
            }
            StoreRequest::Flush => self.disk.sync(),
            StoreRequest::Deallocate { .. } => {
                Err(io::Error::other("a torn store does not deallocate"))
            }
        };
        self.done.push(StoreDone { ticket, result, buffer: request.into_buffer() });
    }

    fn poll(&mut self, done: &mut Vec<StoreDone>) {
        done.append(&mut self.done);
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// The device as a trait object.
pub fn device(served: &Served) -> Arc<dyn Device> {
    Arc::clone(&served.device) as Arc<dyn Device>
}
