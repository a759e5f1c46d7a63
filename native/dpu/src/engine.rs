//! The seam between the card's protocol and what seals.

use std::collections::HashMap;
use std::io;
use std::time::Duration;

use sealane_proto::aead::Secret;

use crate::rings::Rings;

/// Number of a daemon's connection.
pub type Daemon = u64;

/// Number of a queue; none is used twice.
pub type QueueNumber = u64;

/// Daemons by the places of their keys.
pub type Owners = HashMap<u16, Daemon>;

/// What an engine can do.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Name of its kind, up to 19 ASCII characters: the product of the card's evidence.
    pub product: String,
    /// Jobs of a queue.
    pub depth: u16,
    /// Keys.
    pub keys: u16,
    /// Most bytes of additional data.
    pub aad_bytes_max: u16,
}

/// What seals the jobs of all queues.
pub trait Engine {
    /// What it can do.
    fn limits(&self) -> &Limits;

    /// Puts a key in a place that is free, less than `limits().keys`; false if it can't.
    fn load(&mut self, place: u16, secret: &Secret) -> bool;

    /// Forgets a key, after the jobs that have it. If those don't end, the next [`Self::work`] fails.
    fn unload(&mut self, place: u16);

    /// Takes a queue of a daemon; false if it can't.
    fn open(&mut self, number: QueueNumber, daemon: Daemon, rings: Rings) -> bool;

    /// Ends a queue, after its jobs. If those don't end, the next [`Self::work`] fails.
    fn close(&mut self, number: QueueNumber);

    /// Does everything that can be done now. A job with a key that isn't its daemon's fails. After an
    /// error nothing more can be done: the program ends.
    fn work(&mut self, owners: &Owners) -> io::Result<()>;

    /// In what time [`Self::work`] must be called if no daemon says anything; `None`: never.
    fn wait(&self) -> Option<Duration>;
}
