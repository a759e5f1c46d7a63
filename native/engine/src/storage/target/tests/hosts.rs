//! Hosts with one socket and one queue machine each, used like a blocking client.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use sealane_proto::aead::Secret;
use sealane_proto::nvme::controller_queue::ControllerLimits;
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::nvme::host_queue::{HostEvent, HostLimits, HostQueue};
use sealane_proto::nvme::pdu::Digests;
use sealane_proto::nvme::reader::StreamSink;
use sealane_proto::nvme::status::Status;
use sealane_proto::sector::{BLOCK_BYTES, DATA_BYTES, field, metadata_mut};
use sealane_proto::secure_queue::{QueueContext, SecureQueue};

use crate::permit::Permit;
use crate::storage::target::{AnaState, Controller, Namespace};

pub const DIGESTS: Digests = Digests { header: true, data: true };
const TRANSFER_MAX: usize = 256 * 1024;

pub fn secure(queue_id: u16) -> SecureQueue {
    secure_of("host", queue_id)
}

/// Keys for a queue of this gateway.
fn secure_of(gateway: &str, queue_id: u16) -> SecureQueue {
    let context = QueueContext {
        volume_id: [1; 16],
        host_nqn: format!("nqn.2026-11.dev.sealane:{gateway}"),
        queue_id,
        association_epoch: 1,
        incarnation: 1,
    };
    SecureQueue::new(&Secret::take(&mut [8; 32]), &context)
}

pub fn limits(queue_depth: u16) -> ControllerLimits {
    ControllerLimits {
        queue_depth,
        h2c_data_max: TRANSFER_MAX,
        in_capsule_max: 8192,
        transfer_max: TRANSFER_MAX,
        success_flag: false,
        digests: DIGESTS,
    }
}

/// A controller for a host, with this namespace as number 1.
pub fn controller(host: u8, namespace: &Arc<Namespace>) -> Controller {
    let controller = Controller::new(u64::from(host), [host; 16]).unwrap();
    controller.set_namespaces(vec![(1, Arc::clone(namespace), AnaState::Optimized)]);
    controller
}

/// As [`controller`], with a permit.
pub fn permitted(host: u8, namespace: &Arc<Namespace>, permit: &Arc<Permit>) -> Controller {
    let (association, permit) = (u64::from(host), Some(Arc::clone(permit)));
    let controller = Controller::permitted(association, [host; 16], permit).unwrap();
    controller.set_namespaces(vec![(1, Arc::clone(namespace), AnaState::Optimized)]);
    controller
}

pub struct Host {
    stream: UnixStream,
    queue: HostQueue,
    next_tag: u64,
    ended: HashMap<u64, (Status, Vec<u8>)>,
    /// The highest mark in an answer so far.
    pub mark: u64,
}

/// Limits that a host negotiates.
pub fn host_limits(is_sealed: bool) -> HostLimits {
    HostLimits {
        queue_depth: 32,
        h2c_data_max: TRANSFER_MAX,
        transfer_max: TRANSFER_MAX,
        in_capsule_max: 8192,
        block_bytes: if is_sealed { BLOCK_BYTES } else { DATA_BYTES },
        nsid: 1,
        digests: DIGESTS,
    }
}

impl Host {
    /// Connects a queue: secure if the namespace is sealed, otherwise plain.
    pub fn connect(controller: &Controller, queue_id: u16, is_sealed: bool) -> Self {
        let keys = || is_sealed.then(|| secure(queue_id));
        Self::connect_with(controller, queue_id, keys(), keys())
    }

    /// Connects a secure queue of a gateway.
    pub fn gateway(controller: &Controller, gateway: &str) -> Self {
        let keys = || Some(secure_of(gateway, 1));
        Self::connect_with(controller, 1, keys(), keys())
    }

    fn connect_with(
        controller: &Controller,
        queue_id: u16,
        own: Option<SecureQueue>,
        other: Option<SecureQueue>,
    ) -> Self {
        let (near, far) = UnixStream::pair().unwrap();
        controller.start_queue(far.into(), queue_id, limits(32), other).unwrap();
        let limits = host_limits(own.is_some());
        Self::over(near, HostQueue::new(limits, own))
    }

    /// A host on an existing connection.
    pub fn over(stream: UnixStream, queue: HostQueue) -> Self {
        Self { stream, queue, next_tag: 0, ended: HashMap::new(), mark: 0 }
    }

    pub fn submit(&mut self, command: HostCommand) -> u64 {
        self.next_tag += 1;
        self.queue.submit(self.next_tag, command).expect("the queue takes it");
        self.stream.write_all(&self.queue.transmit().take()).unwrap();
        self.next_tag
    }

    pub fn finish(&mut self, tag: u64) -> (Status, Vec<u8>) {
        loop {
            if let Some(ended) = self.ended.remove(&tag) {
                return ended;
            }
            let mut buffer = [0; 8192];
            let bytes = self.stream.read(&mut buffer).unwrap();
            assert!(bytes > 0, "the controller closed the connection");
            self.queue.receive(&buffer[..bytes]);
            self.stream.write_all(&self.queue.transmit().take()).unwrap();
            while let Some(event) = self.queue.next_event() {
                match event {
                    HostEvent::Completed { tag, status, mark, data } => {
                        self.mark = mark.max(self.mark);
                        self.ended.insert(tag, (status, data));
                    }
                    HostEvent::Failed { detail, .. } => panic!("{detail}"),
                }
            }
        }
    }

    /// Waits for the end of the connection; asserts that nothing was answered before it.
    pub fn wait_cut(&mut self) {
        let mut rest = Vec::new();
        // A socket closed with unread bytes ends with an error.
        let _ = self.stream.read_to_end(&mut rest);
        assert_eq!(rest.len(), 0, "something was answered");
    }

    pub fn run(&mut self, command: HostCommand) -> (Status, Vec<u8>) {
        let tag = self.submit(command);
        self.finish(tag)
    }

    pub fn status(&mut self, command: HostCommand) -> Status {
        self.run(command).0
    }

    pub fn read(&mut self, lba: u64, blocks: u32) -> Vec<u8> {
        let (status, data) = self.run(HostCommand::Read { lba, blocks });
        assert_eq!(status, Status::SUCCESS);
        data
    }

    pub fn write(&mut self, lba: u64, data: Vec<u8>) -> Status {
        self.status(HostCommand::Write { lba, data, is_forced: false })
    }
}

/// Blocks of a plain namespace.
pub fn plain(byte: u8, blocks: usize) -> Vec<u8> {
    vec![byte; blocks * DATA_BYTES]
}

/// A block that a target takes for a sealed one.
pub fn sealed(iv: u64) -> Vec<u8> {
    let mut block = [iv as u8; BLOCK_BYTES];
    metadata_mut(&mut block, (0, 64)).fill(0);
    metadata_mut(&mut block, field::IV)[..8].copy_from_slice(&iv.to_le_bytes());
    metadata_mut(&mut block, field::VERSION).fill(1);
    block.to_vec()
}
