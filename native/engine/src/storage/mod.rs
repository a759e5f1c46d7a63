//! Storage data path: queue threads of target, gateway and initiator, sector stores, freshness.
//!
//! One thread per I/O queue owns its socket. Control is asynchronous and elsewhere: it hands a
//! connected socket over, reads statistics and events, and stops queues synchronously.

pub mod connection;
pub mod events;
pub mod gateway;
pub mod initiator;
pub mod load;
pub mod pieces;
pub mod queues;
pub mod store;
pub mod stores;
pub mod target;
pub mod upkeep;
