//! Real queue threads between test hosts and a store that provokes races.

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
