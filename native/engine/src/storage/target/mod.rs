//! Target: namespaces, controllers, and the threads that serve their I/O queues.

pub mod controller;
mod execution;
pub mod jobs;
mod mailbox;
pub mod namespace;
pub mod qos;
mod range_lock;
pub mod reservation;
mod worker;

pub use controller::Controller;
pub use namespace::{AnaState, Namespace};
pub use qos::QosLimits;

#[cfg(test)]
mod tests;
