//! Memory that operations of closed sessions use, until the fabric has ended those sessions.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use sealane_engine::session::layout::STATE_CLOSED;
use sealane_engine::session::ring::JobRing;

/// What each operation of a session keeps alive, by its `user_data`.
pub type Held = HashMap<u64, Py<PyAny>>;

/// Sessions that this process has closed, and what the fabric may still read or write for them.
static LINGERING: Mutex<Vec<(JobRing, Held)>> = Mutex::new(Vec::new());

/// Keeps what a closed session's operations use until the fabric has ended that session; for good
/// if the fabric is killed before.
pub fn keep(ring: JobRing, held: Held) {
    LINGERING.lock().unwrap_or_else(PoisonError::into_inner).push((ring, held));
}

/// Frees what belongs to sessions that the fabric has ended.
pub fn free_ended() {
    let mut lingering = LINGERING.lock().unwrap_or_else(PoisonError::into_inner);
    let is_over = |(ring, _): &mut (JobRing, Held)| ring.state() == STATE_CLOSED;
    let ended: Vec<_> = lingering.extract_if(.., is_over).collect();
    // Freeing runs code of Python, which may come back here.
    drop(lingering);
    drop(ended);
}
