//! A gateway's volume and a target in this process, on a store that a test can look into.

#![allow(dead_code)] // each user has a part

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use sealane_engine::storage::gateway::{
    BackQueue, GatewaySettings, GatewayVolume, Incarnation, VolumeFormat,
};
use sealane_engine::storage::load::LoadPlan;
use sealane_engine::storage::store::BlockStore;
use sealane_engine::storage::target::{AnaState, Controller, Namespace};
use sealane_proto::aead::Secret;
use sealane_proto::key_ring::KeyRing;
use sealane_proto::nvme::controller_queue::ControllerLimits;
use sealane_proto::nvme::host_queue::HostLimits;
use sealane_proto::nvme::pdu::Digests;
use sealane_proto::sector::{BLOCK_BYTES, CounterRange, SealKey, VolumeIdentity};
use sealane_proto::secure_queue::{QueueContext, SecureQueue};

/// Sectors of the volume.
pub const SECTORS: u64 = 4096;
const EPOCH: u32 = 1;
const TRANSFER_SECTORS: usize = 16;
const PATIENCE: Duration = Duration::from_secs(60);

fn identity() -> VolumeIdentity {
    VolumeIdentity { volume_id: [1; 16], generation: 1 }
}

fn secret() -> Secret {
    Secret::take(&mut [7; 32])
}

/// The key that the volume seals with.
pub fn seal_key() -> SealKey {
    SealKey::new(&secret(), identity(), EPOCH)
}

/// A volume with counters for as much as a test writes.
pub fn volume() -> GatewayVolume {
    let settings = GatewaySettings {
        command_timeout: PATIENCE,
        hold: PATIENCE,
        journal_bytes_max: 16 << 20,
        commands_per_key_max: 1 << 48,
    };
    let keys = KeyRing::new(identity(), EPOCH, EPOCH, &secret()).unwrap();
    let format = VolumeFormat { block_count: SECTORS, is_fully_sealed: false, is_read_only: false };
    let volume = GatewayVolume::new(keys, format, settings, None).unwrap();
    volume.add_counters(CounterRange::new(1, 1, 1 << 20, 1 << 46).unwrap());
    volume
}

/// One of the volume's statistics.
pub fn statistic(volume: &GatewayVolume, name: &str) -> u64 {
    let found = volume.statistics().into_iter().find(|(known, _)| *known == name);
    found.expect("a statistic of this name").1
}

/// A namespace on a store.
pub fn namespace(store: impl BlockStore + 'static) -> Arc<Namespace> {
    Arc::new(Namespace::new(Box::new(store)).unwrap())
}

fn secure(epoch: u64) -> SecureQueue {
    let context = QueueContext {
        volume_id: [1; 16],
        host_nqn: "nqn.2026-11.dev.sealane:gateway:test".into(),
        queue_id: 1,
        association_epoch: epoch,
        incarnation: 1,
    };
    SecureQueue::new(&Secret::take(&mut [8; 32]), &context)
}

/// A controller of the target, and the gateway's end of its queue, in a new association.
pub fn connect(namespace: &Arc<Namespace>, epoch: u64) -> (Controller, OwnedFd, BackQueue) {
    let controller = Controller::new(1, Default::default()).unwrap();
    controller.set_namespaces(vec![(1, Arc::clone(namespace), AnaState::Optimized)]);
    let (near, far) = UnixStream::pair().unwrap();
    let limits = ControllerLimits {
        queue_depth: 64,
        h2c_data_max: 1 << 18,
        in_capsule_max: 8192,
        transfer_max: 1 << 18,
        success_flag: false,
        digests: Digests::default(),
    };
    controller.start_queue(far.into(), 1, limits, Some(secure(epoch))).unwrap();
    let limits = HostLimits {
        queue_depth: 64,
        h2c_data_max: 1 << 18,
        transfer_max: TRANSFER_SECTORS * BLOCK_BYTES,
        in_capsule_max: 8192,
        block_bytes: BLOCK_BYTES,
        nsid: 1,
        digests: Digests::default(),
    };
    let incarnation = Incarnation { number: 1, confirmed: None, milestone: None };
    (controller, near.into(), BackQueue { limits, secure: secure(epoch), epoch, incarnation })
}

/// Reads or writes of `sectors` each at random places, 32 at a time.
pub fn plan(is_write: bool, sectors: u32, duration: Duration, seed: u64) -> LoadPlan {
    LoadPlan {
        is_write,
        is_random: true,
        io_blocks: sectors,
        depth: 32,
        span: 0..SECTORS,
        duration,
        timeout: PATIENCE,
        seed,
        is_verified: false,
    }
}
