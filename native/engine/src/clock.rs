//! The engine's clock: CLOCK_MONOTONIC in nanoseconds, as passed to every machine of
//! `sealane-proto`.

use rustix::event::Timespec;
use rustix::time::{ClockId, clock_gettime};
use sealane_proto::link::{NANOS_PER_SECOND, Nanos};

/// The current time.
pub fn now() -> Nanos {
    read(ClockId::Monotonic)
}

/// Nanoseconds since boot, including suspended time, for bounds that must hold across suspension.
pub fn boot_time() -> Nanos {
    read(ClockId::Boottime)
}

/// Nanoseconds since 1970, only for comparison with time stamps of the kernel.
pub fn wall_clock() -> Nanos {
    read(ClockId::Realtime)
}

/// Processor time used by this thread.
pub fn thread_cpu() -> Nanos {
    read(ClockId::ThreadCPUTime)
}

fn read(clock: ClockId) -> Nanos {
    let time = clock_gettime(clock);
    time.tv_sec.cast_unsigned() * NANOS_PER_SECOND + time.tv_nsec.cast_unsigned()
}

/// Converts a duration for the kernel.
pub fn timespec(nanos: Nanos) -> Timespec {
    Timespec {
        tv_sec: (nanos / NANOS_PER_SECOND).cast_signed(),
        tv_nsec: (nanos % NANOS_PER_SECOND).cast_signed(),
    }
}

/// Converts a duration from [`timespec`] back.
pub fn nanos(duration: Timespec) -> Nanos {
    let part = |value: i64| value.try_into().unwrap_or(0);
    Nanos::saturating_mul(part(duration.tv_sec), NANOS_PER_SECOND) + part(duration.tv_nsec)
}

/// Makes this thread's timers fire when they are due, instead of up to 50 µs later.
pub fn sharpen_timers() {
    // If the kernel refuses, the default slack remains: microseconds late, but still correct.
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
}
