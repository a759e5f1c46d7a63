//! The load generator on a queue of the gateway itself. It measures sealing and the path to the
//! target without the path from the host to the gateway, as the paper does.

use std::sync::Arc;

use rustix::event::{PollFd, PollFlags};
use sealane_proto::nvme::controller_queue::{Command, Operation};
use sealane_proto::nvme::host_command::HostCommand;
use sealane_proto::sector::DATA_BYTES;

use super::super::initiator::{TransferError, closed};
use super::super::load::{Load, LoadPlan, LoadResult, Port};
use super::front::{Front, LocalFront};
use super::queue::GatewayQueue;
use super::worker::{ready_until, receive, send, take_mail};
use super::{BackQueue, GatewayVolume, Mailbox, OwnedFd, QueueName};
use crate::clock::now;

/// Name of the load's queue; no host's association has this tag.
const LOCAL: QueueName = QueueName { association: u64::MAX, queue_id: 1 };

struct GatewayPort {
    queue: GatewayQueue<LocalFront>,
    mailbox: Arc<Mailbox>,
    outstanding: usize,
}

impl Port for GatewayPort {
    fn submit(&mut self, tag: u64, command: HostCommand) -> Result<(), TransferError> {
        let (operation, lba, blocks) = match command {
            HostCommand::Read { lba, blocks } => (Operation::Read, lba, blocks),
            HostCommand::Write { lba, data, .. } => {
                let blocks = (data.len() / DATA_BYTES) as u32;
                (Operation::Write(data), lba, blocks)
            }
            _ => return Err(TransferError::Length),
        };
        let slot = tag as u16;
        let command = Command {
            slot,
            nsid: 1,
            operation,
            lba,
            blocks,
            is_forced: false,
            is_sent_again: false,
            number: 0,
            cid: slot,
        };
        self.queue.front.submit(command);
        self.outstanding += 1;
        Ok(())
    }

    fn buffer(&mut self, bytes: usize) -> Vec<u8> {
        self.queue.front.buffer(bytes)
    }

    fn exchange(&mut self) -> Result<(), TransferError> {
        let queue = &mut self.queue;
        let unexpected = queue.take_front_events(now());
        debug_assert!(unexpected.is_none(), "a local front doesn't fail");
        queue.submit(now());
        send(queue);
        if queue.front.has_end() {
            return Ok(()); // the gateway refused it: there will be no answer
        }
        let first = [PollFd::from_borrowed_fd(self.mailbox.as_fd(), PollFlags::IN)];
        let ready = ready_until(queue, first, None).map_err(|error| closed(error.to_string()))?;
        receive(queue, ready.get(1..).unwrap_or_default());
        if ready.first().is_some_and(|woken| !woken.is_empty()) {
            take_mail(queue, &self.mailbox);
        }
        let time = now();
        queue.take_back_events(time);
        queue.handle_timeout(time);
        Ok(())
    }

    fn next_end(&mut self) -> Result<Option<(u64, Vec<u8>)>, TransferError> {
        let Some((slot, status)) = self.queue.front.next_end() else { return Ok(None) };
        self.outstanding -= 1;
        if status.is_success() {
            Ok(Some((u64::from(slot), Vec::new())))
        } else {
            Err(TransferError::Status { status, lba: 0 })
        }
    }

    fn recycle(&mut self, _: Vec<u8>) {}

    fn outstanding(&self) -> usize {
        // Also wait for the gateway's own flush, as dropping the queue with it would end the
        // association.
        self.outstanding.max(usize::from(!self.queue.parts.is_empty()))
    }
}

impl GatewayVolume {
    /// Runs a load of reads or writes on a queue of this process, on the caller's thread. `fd` and
    /// `back` are its back end, as for [`GatewayVolume::replace_back`]. One load at a time. Fails
    /// with [`TransferError::Status`] also if the back end is lost for longer than commands are
    /// held.
    pub fn run_load(
        &self,
        fd: OwnedFd,
        back: BackQueue,
        plan: &LoadPlan,
    ) -> Result<LoadResult, TransferError> {
        if plan.is_verified {
            // No data of reads are kept.
            return Err(TransferError::Unverifiable);
        }
        let depth = u16::try_from(plan.depth).map_err(|_| TransferError::Length)?;
        let mailbox = Arc::new(Mailbox::new().map_err(|error| closed(error.to_string()))?);
        self.shared.mailboxes().insert(LOCAL, Arc::clone(&mailbox));
        let front = LocalFront::default();
        let queue = GatewayQueue::new(Arc::clone(&self.shared), LOCAL, front, depth);
        let port = GatewayPort { queue, mailbox, outstanding: 0 };
        let result = self
            .replace_back(LOCAL, fd, back)
            .map_err(|error| closed(error.to_string()))
            .and_then(|()| Load::new(port, DATA_BYTES, plan, plan.span.clone(), 0).run());
        self.shared.mailboxes().remove(&LOCAL);
        result
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use sealane_proto::aead::Secret;
    use sealane_proto::key_ring::KeyRing;
    use sealane_proto::nvme::controller_queue::ControllerLimits;
    use sealane_proto::nvme::host_queue::HostLimits;
    use sealane_proto::nvme::pdu::Digests;
    use sealane_proto::nvme::status::Status;
    use sealane_proto::sector::{BLOCK_BYTES, CounterRange, VolumeIdentity};
    use sealane_proto::secure_queue::{QueueContext, SecureQueue};

    use super::super::{GatewaySettings, GatewayVolume, Incarnation, VolumeFormat};
    use super::*;
    use crate::storage::stores::memory::MemoryStore;
    use crate::storage::target::{AnaState, Controller, Namespace};

    const BLOCKS: u64 = 64;
    const SPLIT: u32 = 40;

    fn secure() -> SecureQueue {
        let context = QueueContext {
            volume_id: [1; 16],
            host_nqn: "nqn.2026-11.dev.sealane:gateway:test".into(),
            queue_id: 1,
            association_epoch: 1,
            incarnation: 1,
        };
        SecureQueue::new(&Secret::take(&mut [8; 32]), &context)
    }

    fn volume() -> GatewayVolume {
        let settings = GatewaySettings {
            command_timeout: Duration::from_secs(20),
            hold: Duration::from_secs(20),
            journal_bytes_max: 1 << 20,
            commands_per_key_max: 1 << 48,
        };
        let identity = VolumeIdentity { volume_id: [1; 16], generation: 1 };
        let keys = KeyRing::new(identity, 1, 1, &Secret::take(&mut [7; 32])).unwrap();
        let format =
            VolumeFormat { block_count: BLOCKS, is_fully_sealed: false, is_read_only: false };
        GatewayVolume::new(keys, format, settings, None).unwrap()
    }

    /// A target for the volume, and the gateway's connection to it.
    fn target(namespace: &Arc<Namespace>) -> (Controller, OwnedFd) {
        let controller = Controller::new(1, Default::default()).unwrap();
        controller.set_namespaces(vec![(1, Arc::clone(namespace), AnaState::Optimized)]);
        let (near, far) = UnixStream::pair().unwrap();
        let limits = ControllerLimits {
            queue_depth: 16,
            h2c_data_max: 1 << 18,
            in_capsule_max: 8192,
            transfer_max: 1 << 18,
            success_flag: false,
            digests: Digests::default(),
        };
        controller.start_queue(far.into(), 1, limits, Some(secure())).unwrap();
        (controller, near.into())
    }

    fn back() -> BackQueue {
        let limits = HostLimits {
            queue_depth: 16,
            h2c_data_max: 1 << 18,
            transfer_max: SPLIT as usize / 2 * BLOCK_BYTES,
            in_capsule_max: 8192,
            block_bytes: BLOCK_BYTES,
            nsid: 1,
            digests: Digests::default(),
        };
        let incarnation = Incarnation { number: 1, confirmed: None, milestone: None };
        BackQueue { limits, secure: secure(), epoch: 1, incarnation }
    }

    fn plan(is_write: bool, io_blocks: u32) -> LoadPlan {
        LoadPlan {
            is_write,
            is_random: false,
            io_blocks,
            depth: 3,
            span: 0..BLOCKS,
            duration: Duration::from_millis(20),
            timeout: Duration::from_secs(20),
            seed: 1,
            is_verified: false,
        }
    }

    #[test]
    fn a_load_at_the_gateways_own_queue_is_sealed_stored_and_opened() {
        let namespace = Namespace::new(Box::new(MemoryStore::new(BLOCKS, true))).unwrap();
        let (namespace, volume) = (Arc::new(namespace), volume());
        volume.add_counters(CounterRange::new(1, 1, 1 << 20, 1 << 40).unwrap());
        let count = |name| {
            let found = volume.statistics().into_iter().find(|(known, _)| *known == name);
            found.map_or(0, |(_, value)| value)
        };
        for io_blocks in [1, SPLIT] {
            let (controller, fd) = target(&namespace);
            let before = count("sectors_sealed");
            let result = volume.run_load(fd, back(), &plan(true, io_blocks)).unwrap();
            assert!(result.commands > 0);
            assert_eq!(count("sectors_sealed") - before, result.commands * u64::from(io_blocks));
            controller.close();
        }
        let (_controller, fd) = target(&namespace);
        let result = volume.run_load(fd, back(), &plan(false, 1)).unwrap();
        // Only the first 40 of the 64 blocks were written: reads of them are opened.
        assert!(result.commands > 0 && count("sectors_opened") > 0);
        assert_eq!(count("sectors_opened") + count("sectors_unwritten"), result.commands);
    }

    #[test]
    fn a_load_at_the_gateways_own_queue_is_not_verified() {
        let namespace = Namespace::new(Box::new(MemoryStore::new(BLOCKS, true))).unwrap();
        let (_controller, fd) = target(&Arc::new(namespace));
        let verified = LoadPlan { is_verified: true, ..plan(true, 1) };
        let refused = volume().run_load(fd, back(), &verified);
        assert!(matches!(refused, Err(TransferError::Unverifiable)));
    }

    #[test]
    fn a_load_that_the_gateway_refuses_fails() {
        let namespace = Namespace::new(Box::new(MemoryStore::new(BLOCKS, true))).unwrap();
        let (_controller, fd) = target(&Arc::new(namespace));
        let refused = volume().run_load(fd, back(), &plan(true, 1)).unwrap_err();
        let TransferError::Status { status, .. } = refused else { panic!("{refused}") };
        assert_eq!(status, Status::NAMESPACE_NOT_READY, "no counters are leased");
    }
}
