//! The engine's clock: CLOCK_MONOTONIC in nanoseconds, the time that every machine is given.

use rustix::event::Timespec;
use rustix::time::{ClockId, clock_gettime};
use sealane_proto::link::{NANOS_PER_SECOND, Nanos};

/// The time now.
pub fn now() -> Nanos {
    read(ClockId::Monotonic)
}

/// Nanoseconds since the machine was started, those included in which it was suspended: for bounds that
/// nobody may stretch.
pub fn boot_time() -> Nanos {
    read(ClockId::Boottime)
}

/// Nanoseconds since 1970: only to compare with time stamps of the kernel.
pub fn wall_clock() -> Nanos {
    read(ClockId::Realtime)
}

/// Processor time that this thread has used.
pub fn thread_cpu() -> Nanos {
    read(ClockId::ThreadCPUTime)
}

fn read(clock: ClockId) -> Nanos {
    let time = clock_gettime(clock);
    time.tv_sec.cast_unsigned() * NANOS_PER_SECOND + time.tv_nsec.cast_unsigned()
}

/// A duration as the kernel takes it.
pub fn timespec(nanos: Nanos) -> Timespec {
    Timespec {
        tv_sec: (nanos / NANOS_PER_SECOND).cast_signed(),
        tv_nsec: (nanos % NANOS_PER_SECOND).cast_signed(),
    }
}

/// A duration that [`timespec`] made, again.
pub fn nanos(duration: Timespec) -> Nanos {
    let part = |value: i64| value.try_into().unwrap_or(0);
    Nanos::saturating_mul(part(duration.tv_sec), NANOS_PER_SECOND) + part(duration.tv_nsec)
}

/// Lets this thread's timers fire when they are due, not up to 50 µs later.
pub fn sharpen_timers() {
    // A kernel that refuses leaves the default slack: late by microseconds, still correct.
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
}
