//! Hosts and a hostile store around real queue threads.

mod commands;
mod concurrency;
mod hosts;
mod lifetime;
mod reservations;
mod store;
