//! Wake-ups by eventfd, which is readable from the first ring until it is cleared.

use std::os::fd::AsFd;

/// Makes an eventfd readable.
pub(crate) fn ring(event: impl AsFd) {
    // Writing 1 fails only after 2^64-2 unread ones; then it is readable, too.
    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
}

/// Makes a non-blocking eventfd no longer readable.
pub(crate) fn clear(event: impl AsFd) {
    // Nothing to read means that it was cleared already.
    let _ = rustix::io::read(event, &mut [0; 8]);
}
