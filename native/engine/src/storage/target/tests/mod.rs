//! Hosts and a hostile store around real queue threads.

mod commands;
mod concurrency;
pub mod hosts;
mod lifetime;
mod order;
mod outcomes;
mod permits;
mod reservations;
mod sent_again;
pub mod store;
mod two_gateways;
