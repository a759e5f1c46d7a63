use ReservationType as T;

use super::*;

const A: HostId = [1; 16];
const B: HostId = [2; 16];
const C: HostId = [3; 16];

const TYPES: [ReservationType; 6] = [
    T::WriteExclusive,
    T::ExclusiveAccess,
    T::WriteExclusiveRegistrants,
    T::ExclusiveAccessRegistrants,
    T::WriteExclusiveAllRegistrants,
    T::ExclusiveAccessAllRegistrants,
];

fn registration(action: RegisterAction, current_key: u64, new_key: u64) -> Register {
    let persistence = Persistence::Unchanged;
    Register { action, ignore_key: false, persistence, current_key, new_key }
}

fn register(reservations: &mut Reservations, host: HostId, key: u64) -> Result<Notices, Refusal> {
    reservations.register(host, registration(RegisterAction::Register, 0, key))
}

fn unregister(reservations: &mut Reservations, host: HostId, key: u64) -> Result<Notices, Refusal> {
    reservations.register(host, registration(RegisterAction::Unregister, key, 0))
}

fn acquire(
    reservations: &mut Reservations,
    host: HostId,
    kind: ReservationType,
    current_key: u64,
) -> Result<Notices, Refusal> {
    let action = AcquireAction::Acquire;
    reservations.acquire(host, Acquire { action, kind, current_key, preempt_key: 0 })
}

fn preempt(
    reservations: &mut Reservations,
    host: HostId,
    kind: ReservationType,
    keys: (u64, u64),
) -> Result<Notices, Refusal> {
    let (current_key, preempt_key) = keys;
    let action = AcquireAction::Preempt;
    reservations.acquire(host, Acquire { action, kind, current_key, preempt_key })
}

/// A (key 10) and B (key 20) are registered; A holds `kind`, if any.
fn world(kind: Option<ReservationType>) -> Reservations {
    let mut reservations = Reservations::default();
    register(&mut reservations, A, 10).unwrap();
    register(&mut reservations, B, 20).unwrap();
    if let Some(kind) = kind {
        acquire(&mut reservations, A, kind, 10).unwrap();
    }
    reservations
}

fn keys(reservations: &Reservations) -> Vec<(HostId, u64, bool)> {
    reservations.registrants().collect()
}

#[test]
fn every_type_permits_exactly_the_commands_of_the_specifications_table() {
    // By type: (registrant reads, registrant writes, others read, others write).
    let expected = [
        (true, false, true, false),
        (false, false, false, false),
        (true, true, true, false),
        (true, true, false, false),
        (true, true, true, false),
        (true, true, false, false),
    ];
    for (kind, expected) in TYPES.into_iter().zip(expected) {
        let reservations = world(Some(kind));
        let seen = |host| {
            let allows = |group| reservations.allows(host, group);
            (allows(Group::Read), allows(Group::Write))
        };
        assert_eq!(seen(A), (true, true), "{kind:?}");
        assert_eq!(seen(B), (expected.0, expected.1), "{kind:?}");
        assert_eq!(seen(C), (expected.2, expected.3), "{kind:?}");
    }
    let reservations = world(None);
    assert!(!reservations.is_reserved());
    assert!([Group::Read, Group::Write].into_iter().all(|group| reservations.allows(C, group)));
}

#[test]
fn only_a_holder_acquires_again_and_only_the_same_type() {
    for kind in TYPES {
        let all = is_held_by_all(kind);
        for other in TYPES {
            let mut reservations = world(Some(kind));
            let again = acquire(&mut reservations, A, other, 10);
            assert_eq!(again.is_ok(), kind == other, "{kind:?} {other:?}");
            let by_other = acquire(&mut reservations, B, other, 20);
            assert_eq!(by_other.is_ok(), all && kind == other, "{kind:?} {other:?}");
            assert_eq!(reservations.held(), Some((kind, (!all).then_some(A))));
        }
        assert_eq!(acquire(&mut world(None), A, kind, 11), Err(Refusal::Conflict));
        assert_eq!(acquire(&mut world(None), C, kind, 0), Err(Refusal::Conflict));
    }
}

#[test]
fn a_key_is_registered_once_and_replaced_only_with_its_current_value() {
    let mut reservations = world(None);
    assert_eq!(register(&mut reservations, A, 10), Ok(vec![]));
    assert_eq!(register(&mut reservations, A, 11), Err(Refusal::Conflict));
    assert_eq!(register(&mut reservations, C, 0), Err(Refusal::InvalidField));
    let replace = |current, new| registration(RegisterAction::Replace, current, new);
    assert_eq!(reservations.register(A, replace(99, 12)), Err(Refusal::Conflict));
    assert_eq!(reservations.register(A, replace(10, 0)), Err(Refusal::InvalidField));
    assert_eq!(reservations.register(C, replace(10, 12)), Err(Refusal::Conflict));
    assert_eq!(reservations.register(A, replace(10, 12)), Ok(vec![]));
    let ignoring = Register { ignore_key: true, ..replace(99, 13) };
    assert_eq!(reservations.register(C, ignoring), Err(Refusal::Conflict));
    assert_eq!(reservations.register(A, ignoring), Ok(vec![]));
    assert_eq!(keys(&reservations), [(A, 13, false), (B, 20, false)]);
    assert_eq!(unregister(&mut reservations, A, 10), Err(Refusal::Conflict));
    assert_eq!(unregister(&mut reservations, A, 13), Ok(vec![]));
    assert_eq!(unregister(&mut reservations, A, 13), Err(Refusal::Conflict));
}

#[test]
fn persistence_through_power_loss_is_refused_and_its_absence_granted() {
    let mut reservations = Reservations::default();
    let base = registration(RegisterAction::Register, 0, 5);
    let set = Register { persistence: Persistence::Set, ..base };
    assert_eq!(reservations.register(A, set), Err(Refusal::InvalidField));
    assert!(keys(&reservations).is_empty());
    let clear = Register { persistence: Persistence::Clear, ..base };
    assert_eq!(reservations.register(A, clear), Ok(vec![]));
}

#[test]
fn registrants_are_bounded() {
    let mut reservations = Reservations::default();
    for index in 0..REGISTRANTS_MAX {
        register(&mut reservations, [index as u8; 16], 1).unwrap();
    }
    assert_eq!(register(&mut reservations, [0xff; 16], 1), Err(Refusal::Full));
    assert_eq!(reservations.registrants().count(), REGISTRANTS_MAX);
}

#[test]
fn a_holder_that_unregisters_releases_and_admitted_registrants_are_notified() {
    for kind in TYPES {
        let mut reservations = world(Some(kind));
        let notices = unregister(&mut reservations, A, 10).unwrap();
        if is_held_by_all(kind) {
            assert_eq!((notices.len(), reservations.is_reserved()), (0, true), "{kind:?}");
            assert_eq!(unregister(&mut reservations, B, 20), Ok(vec![]));
            assert!(!reservations.is_reserved());
        } else {
            let told = admits_registrants(kind).then_some((B, Notice::ReservationReleased));
            assert_eq!(notices, Vec::from_iter(told), "{kind:?}");
            assert!(!reservations.is_reserved());
        }
        let mut reservations = world(Some(kind));
        unregister(&mut reservations, B, 20).unwrap();
        assert!(reservations.is_reserved(), "{kind:?}");
    }
}

#[test]
fn only_holders_release_and_only_with_the_right_type() {
    for kind in TYPES {
        let mut reservations = world(Some(kind));
        assert_eq!(reservations.release(C, Some(kind), 0), Err(Refusal::Conflict));
        assert_eq!(reservations.release(A, Some(kind), 11), Err(Refusal::Conflict));
        let other = TYPES[kind as usize % 6];
        assert_eq!(reservations.release(A, Some(other), 10), Err(Refusal::InvalidField));
        if !is_held_by_all(kind) {
            assert_eq!(reservations.release(B, Some(kind), 20), Ok(vec![]));
            assert!(reservations.is_reserved(), "a release by a non-holder has no effect");
        }
        let notices = reservations.release(A, Some(kind), 10).unwrap();
        let told = admits_registrants(kind).then_some((B, Notice::ReservationReleased));
        assert_eq!(notices, Vec::from_iter(told), "{kind:?}");
        assert!(!reservations.is_reserved());
    }
}

#[test]
fn clear_removes_everything_and_notifies_all_others() {
    for kind in TYPES {
        let mut reservations = world(Some(kind));
        assert_eq!(reservations.release(B, None, 21), Err(Refusal::Conflict));
        let notices = reservations.release(B, None, 20);
        assert_eq!(notices, Ok(vec![(A, Notice::ReservationPreempted)]));
        assert!(keys(&reservations).is_empty() && !reservations.is_reserved());
    }
}

#[test]
fn preempting_the_holder_takes_the_reservation_over() {
    for kind in [T::WriteExclusive, T::ExclusiveAccess, T::WriteExclusiveRegistrants] {
        for new in TYPES {
            let mut reservations = world(Some(kind));
            register(&mut reservations, C, 30).unwrap();
            let mut expected = vec![(A, Notice::RegistrationPreempted)];
            if admits_registrants(kind) && kind != new {
                expected.push((C, Notice::ReservationReleased));
            }
            assert_eq!(preempt(&mut reservations, B, new, (20, 10)), Ok(expected));
            let holder = (!is_held_by_all(new)).then_some(B);
            assert_eq!(reservations.held(), Some((new, holder)), "{kind:?} {new:?}");
            let left: Vec<_> = keys(&reservations).into_iter().map(|(host, ..)| host).collect();
            assert_eq!(left, [B, C]);
        }
    }
}

#[test]
fn preempting_another_key_only_removes_its_registrants() {
    for kind in TYPES.into_iter().map(Some).chain([None]) {
        let mut reservations = world(kind);
        register(&mut reservations, C, 30).unwrap();
        let before = reservations.held();
        let notices = preempt(&mut reservations, B, T::ExclusiveAccess, (20, 30));
        assert_eq!(notices, Ok(vec![(C, Notice::RegistrationPreempted)]));
        assert_eq!(reservations.held(), before);
        let again = preempt(&mut reservations, B, T::ExclusiveAccess, (20, 30));
        assert_eq!(again, Err(Refusal::Conflict), "no such key");
        let stranger = preempt(&mut reservations, C, T::ExclusiveAccess, (30, 10));
        assert_eq!(stranger, Err(Refusal::Conflict));
    }
}

#[test]
fn the_key_zero_preempts_all_registrants_and_nothing_else() {
    for kind in TYPES.into_iter().map(Some).chain([None]) {
        let mut reservations = world(kind);
        let result = preempt(&mut reservations, B, T::WriteExclusive, (20, 0));
        if kind.is_some_and(is_held_by_all) {
            assert_eq!(result, Ok(vec![(A, Notice::RegistrationPreempted)]));
            assert_eq!(reservations.held(), Some((T::WriteExclusive, Some(B))));
        } else {
            assert_eq!(result, Err(Refusal::InvalidField));
            assert_eq!(keys(&reservations).len(), 2);
        }
    }
}

#[test]
fn a_holder_may_preempt_itself_to_change_the_type() {
    let mut reservations = world(Some(T::WriteExclusive));
    assert_eq!(preempt(&mut reservations, A, T::ExclusiveAccess, (10, 10)), Ok(vec![]));
    assert_eq!(reservations.held(), Some((T::ExclusiveAccess, Some(A))));
    assert_eq!(keys(&reservations).len(), 2);
}

#[test]
fn the_generation_counts_registrations_preemptions_and_clears_only() {
    let mut reservations = world(None);
    assert_eq!(reservations.generation(), 2);
    acquire(&mut reservations, A, T::WriteExclusive, 10).unwrap();
    reservations.release(A, Some(T::WriteExclusive), 10).unwrap();
    acquire(&mut reservations, C, T::WriteExclusive, 10).unwrap_err();
    assert_eq!(reservations.generation(), 2);
    preempt(&mut reservations, A, T::WriteExclusive, (10, 20)).unwrap();
    reservations.release(A, None, 10).unwrap();
    assert_eq!(reservations.generation(), 4);
}

#[test]
fn the_report_has_the_specified_layout_and_the_requested_length() {
    let reservations = world(Some(T::WriteExclusiveRegistrants));
    assert_eq!(reservations.report(false, 4096), Err(Refusal::HostIdFormat));
    let report = reservations.report(true, 256).unwrap();
    assert_eq!(report.len(), 256);
    assert_eq!(report[..10], [2, 0, 0, 0, 3, 2, 0, 0, 0, 0]);
    assert_eq!(report[64..72], [0xff, 0xff, 1, 0, 0, 0, 0, 0]);
    assert_eq!(report[72..80], 10u64.to_le_bytes());
    assert_eq!(report[80..96], A);
    assert_eq!(report[128..131], [0xff, 0xff, 0]);
    assert_eq!(report[136..144], 20u64.to_le_bytes());
    assert!(report[192..].iter().all(|byte| *byte == 0));
    assert_eq!(reservations.report(true, 16).unwrap(), report[..16]);
}
