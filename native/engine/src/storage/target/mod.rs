//! Target: namespaces, controllers, and the threads that serve their I/O queues.

mod assigned;
mod changed;
pub mod controller;
mod execution;
pub mod jobs;
mod load;
mod mailbox;
pub mod namespace;
mod order;
mod outcomes;
pub mod qos;
mod range_lock;
pub mod reservation;
mod worker;

pub use assigned::{AnaState, Assigned};
pub use controller::Controller;
pub use namespace::Namespace;
pub use qos::QosLimits;

#[cfg(test)]
mod tests;
