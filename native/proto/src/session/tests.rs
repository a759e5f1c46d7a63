//! Statements of an authentic but faulty peer, and the harm that must not follow from them. Tests
//! through the public interface cannot produce them, because the machine itself never sends them.

use super::config::PayloadMode;
use super::events::Events;
use super::frame::ENDED;
use super::paths::PathId;
use super::receiver::{Outcome, Receiver, SCRATCH_BYTES_MAX, StreamEnd, Unit};
use super::requests::{
    Memory, ReceiveRequest, Reliability, SendRequest, StreamPart, StreamRequest,
};
use super::sender::Sender;

/// A memory that must not be accessed.
struct Untouched;

impl Memory for Untouched {
    fn read(&self, _: u64, _: &mut [u8]) {
        panic!("read");
    }

    fn write(&mut self, _: u64, _: &[u8]) {
        panic!("written");
    }

    fn chunk_landed(&mut self, _: u16, _: u32) {
        panic!("landed");
    }

    fn chunks_cleared(&mut self, _: u16, _: u32) {
        panic!("cleared");
    }
}

/// A memory that discards all writes.
struct Sink;

impl Memory for Sink {
    fn read(&self, _: u64, into: &mut [u8]) {
        into.fill(0);
    }

    fn write(&mut self, _: u64, _: &[u8]) {}

    fn chunk_landed(&mut self, _: u16, _: u32) {}

    fn chunks_cleared(&mut self, _: u16, _: u32) {}
}

const GOOD: Unit =
    Unit { message: 0, coded: 1, length: 1000, k: 0, m: 0, is_stream: false, immediate: Some(7) };

fn receiver() -> Receiver {
    let mut receiver = Receiver::new(256, 4, 4, PayloadMode::Real);
    receiver.post(ReceiveRequest { offset: 0, length_max: 1000, user_data: 0 }).unwrap();
    receiver
}

#[test]
fn a_unit_that_contradicts_itself_touches_nothing() {
    let mut events = Events::default();
    let bytes = [0; 257];
    let cases = [
        (Unit { message: 1, ..GOOD }, 256, Outcome::Unposted),
        (Unit { coded: 4, ..GOOD }, 256, Outcome::Malformed),
        (Unit { coded: 4, ..GOOD }, 0, Outcome::Malformed),
        (Unit { coded: u32::MAX, k: 2, m: 1, ..GOOD }, 256, Outcome::Malformed),
        (Unit { coded: 3, ..GOOD }, 256, Outcome::Malformed),
        (Unit { k: 1, ..GOOD }, 256, Outcome::Malformed),
        (Unit { m: 1, ..GOOD }, 256, Outcome::Malformed),
        (Unit { coded: 0, k: 2, m: 1, is_stream: true, ..GOOD }, 256, Outcome::Malformed),
        (Unit { k: 200, m: 56, ..GOOD }, 256, Outcome::Malformed),
        (GOOD, 255, Outcome::Malformed),
        (GOOD, 257, Outcome::Malformed),
        (Unit { length: 1001, ..GOOD }, 256, Outcome::TooLong),
    ];
    for (unit, payload_bytes, expected) in cases {
        let mut receiver = receiver();
        let payload = &bytes[..payload_bytes];
        let outcome = receiver.unit_received(unit, payload, &mut Untouched, &mut events);
        assert_eq!(outcome, expected, "{unit:?}");
    }
}

#[test]
fn a_unit_that_contradicts_the_first_of_its_message_touches_nothing() {
    let mut events = Events::default();
    let mut receiver = receiver();
    let payload = [0; 256];
    let first = receiver.unit_received(GOOD, &payload, &mut Sink, &mut events);
    assert_eq!(first, Outcome::Landed);
    let others = [
        Unit { coded: 0, length: 999, ..GOOD },
        Unit { coded: 0, immediate: None, ..GOOD },
        Unit { coded: 0, k: 2, m: 1, ..GOOD },
        Unit { coded: 0, is_stream: true, ..GOOD },
    ];
    for unit in others {
        let outcome = receiver.unit_received(unit, &payload, &mut Untouched, &mut events);
        assert_eq!(outcome, Outcome::Malformed, "{unit:?}");
    }
    let again = receiver.unit_received(GOOD, &payload, &mut Untouched, &mut events);
    assert_eq!(again, Outcome::Duplicate);
}

#[test]
fn what_a_message_lacks_falls_to_nothing_and_is_unknown_of_a_stream() {
    let mut events = Events::default();
    let mut whole = receiver();
    let lengths = [256, 256, 256, 232];
    let lacking: Vec<u64> = (0..4)
        .map(|coded| {
            let unit = Unit { coded, ..GOOD };
            let payload = &[0; 256][..lengths[coded as usize]];
            whole.unit_received(unit, payload, &mut Sink, &mut events);
            whole.units_missing()
        })
        .collect();
    assert_eq!(lacking, [3, 2, 1, 0]);
    let mut stream = receiver();
    stream.unit_received(Unit { is_stream: true, ..GOOD }, &[0; 256], &mut Sink, &mut events);
    assert_eq!(stream.units_missing(), 0);
    let mut coded = receiver();
    coded.unit_received(Unit { k: 4, m: 2, ..GOOD }, &[0; 256], &mut Sink, &mut events);
    assert_eq!(coded.units_missing(), 3, "parity can take the place of any of them");
}

#[test]
fn parity_beyond_the_scratch_is_dropped_unclaimed() {
    let mut events = Events::default();
    let unit_bytes = 64_000;
    let mut receiver = Receiver::new(unit_bytes, 4, 1, PayloadMode::Real);
    let length = u64::from(unit_bytes) * 2 * 400;
    receiver.post(ReceiveRequest { offset: 0, length_max: length, user_data: 0 }).unwrap();
    let payload = vec![0; usize::from(unit_bytes)];
    let coded = Unit { length, k: 2, m: 1, immediate: None, ..GOOD };
    let mut parity = |block: u32| {
        let unit = Unit { coded: block * 3 + 2, ..coded };
        receiver.unit_received(unit, &payload, &mut Sink, &mut events)
    };
    let room = (SCRATCH_BYTES_MAX / usize::from(unit_bytes)) as u32;
    assert!((0..room).all(|block| parity(block) == Outcome::Landed));
    assert_eq!(parity(room), Outcome::ScratchFull);
    assert_eq!(parity(room), Outcome::ScratchFull, "it may come again");
    // A block that becomes complete makes room.
    let unit = Unit { coded: 0, ..coded };
    receiver.unit_received(unit, &payload, &mut Sink, &mut events);
    let unit = Unit { coded: room * 3 + 2, ..coded };
    assert_eq!(receiver.unit_received(unit, &payload, &mut Sink, &mut events), Outcome::Landed);
}

fn sender() -> Sender {
    let mut sender = Sender::new(256, 4, 1);
    let reliability = Reliability::SelectiveRepeat;
    let request = SendRequest {
        offset: 0,
        length: 1000,
        reliability,
        immediate: None,
        priority: 0,
        user_data: 0,
    };
    sender.post(request, 0).unwrap();
    sender.post(request, 0).unwrap();
    sender
}

#[test]
fn what_was_never_sent_cannot_be_confirmed() {
    let mut events = Events::default();
    let mut sender = sender();
    sender.completed_end_received(u64::MAX, 0, &mut events);
    sender.slice_received(0, (ENDED, 0, &[]), 0, &mut events);
    sender.slice_received(1, (2, 0, &[0xff]), 0, &mut events);
    sender.slice_received(u64::MAX, (ENDED, 0, &[]), 0, &mut events);
    assert_eq!(events.pop(), None);
    sender.credit_received(0, [1000, 1000].into_iter());
    sender.advance(0, &mut events);
    for coded in [0, 1, 2, 3] {
        let pick = sender.pick(0, |_, _| Some(1)).unwrap();
        assert_eq!((pick.message, pick.coded), (0, coded));
        sender.sent(pick, (PathId(0), 0), 0, &mut events);
    }
    sender.completed_end_received(2, 5, &mut events);
    assert!(events.pop().is_some());
    assert_eq!(events.pop(), None, "only the first message was sent");
}

#[test]
fn credit_is_contiguous_and_bounded() {
    let mut sender = sender();
    sender.credit_received(1, [1000].into_iter());
    assert_eq!(sender.credit_end(), 0, "a gap");
    sender.credit_received(0, [1000, 1000].into_iter());
    sender.credit_received(0, [1].into_iter());
    assert_eq!(sender.credit_end(), 2);
    sender.credit_received(1, [7; 1000].into_iter());
    assert_eq!(sender.credit_end(), 4, "as many as there are slots");
}

#[test]
fn slices_of_any_content_are_harmless() {
    let mut events = Events::default();
    let mut sender = sender();
    sender.credit_received(0, [1000].into_iter());
    sender.advance(0, &mut events);
    let pick = sender.pick(0, |_, _| Some(1)).unwrap();
    sender.sent(pick, (PathId(0), 0), 0, &mut events);
    sender.slice_received(0, (0, u32::MAX - 7, &[0xff; 9]), 0, &mut events);
    sender.slice_received(0, (3, 0, &[0xff; 99]), 0, &mut events);
    assert_eq!(events.pop(), None, "only the cumulative count ends a message");
}

#[test]
fn an_end_of_a_stream_that_contradicts_touches_nothing() {
    let mut events = Events::default();
    let end = StreamEnd { message: 0, units: 2, length: 1000, immediate: None };
    let cases = [
        (StreamEnd { units: 5, ..end }, Outcome::Malformed),
        (StreamEnd { length: u64::MAX, ..end }, Outcome::Malformed),
        (StreamEnd { length: 1001, ..end }, Outcome::TooLong),
        (StreamEnd { message: 1, ..end }, Outcome::Unposted),
    ];
    for (end, expected) in cases {
        let outcome = receiver().stream_end_received(end, &mut Untouched, &mut events);
        assert_eq!(outcome, expected, "{end:?}");
    }
    let mut receiver = receiver();
    assert_eq!(receiver.unit_received(GOOD, &[0; 256], &mut Sink, &mut events), Outcome::Landed);
    while events.pop().is_some() {}
    // The message in progress is not a stream.
    let mut end_received = |end| receiver.stream_end_received(end, &mut Untouched, &mut events);
    assert_eq!(end_received(StreamEnd { immediate: Some(7), ..end }), Outcome::Malformed);
    assert_eq!(events.pop(), None);
}

#[test]
fn a_stream_ends_with_as_many_units_as_were_said_first() {
    let mut events = Events::default();
    let mut receiver = receiver();
    let end = StreamEnd { message: 0, units: 2, length: 1000, immediate: Some(7) };
    assert_eq!(receiver.stream_end_received(end, &mut Sink, &mut events), Outcome::Landed);
    let less = StreamEnd { units: 0, ..end };
    assert_eq!(receiver.stream_end_received(less, &mut Sink, &mut events), Outcome::Landed);
    let unit = Unit { is_stream: true, ..GOOD };
    let mut land = |coded| {
        let unit = Unit { coded, ..unit };
        receiver.unit_received(unit, &[0; 256], &mut Sink, &mut events)
    };
    assert_eq!(land(0), Outcome::Landed);
    assert_eq!(land(0), Outcome::Duplicate);
    assert_eq!(land(2), Outcome::Completed);
    assert_eq!(land(1), Outcome::Late);
}

#[test]
fn reports_of_losses_cost_one_retransmission_each_and_bounded_work() {
    let mut events = Events::default();
    let mut sender = sender();
    sender.credit_received(0, [1000].into_iter());
    sender.advance(0, &mut events);
    sender.begin_reports();
    sender.losses_received(PathId(0), [(0, u64::MAX)].into_iter());
    for packet in 0..4 {
        let pick = sender.pick(0, |_, _| Some(1_000)).unwrap();
        assert!(!pick.is_retransmission);
        sender.sent(pick, (PathId(0), 10 + packet), 0, &mut events);
    }
    assert_eq!(sender.pick(0, |_, _| Some(1_000)), None, "what was not sent cannot be lost");
    sender.begin_reports();
    sender.losses_received(PathId(0), [(11, 13), (20, u64::MAX)].into_iter());
    sender.begin_reports();
    sender.losses_received(PathId(0), [(0, u64::MAX)].into_iter());
    sender.begin_reports();
    sender.losses_received(PathId(0), [(0, 12), (13, 14)].into_iter());
    assert_eq!(sender.losses(), (4, 0), "each once");
    sender.slice_received(0, (0, 0, &[0b0100]), 0, &mut events);
    let mut repeated = Vec::new();
    while let Some(pick) = sender.pick(0, |_, _| Some(1_000)) {
        assert!(pick.is_retransmission);
        repeated.push(pick.coded);
        sender.sent(pick, (PathId(0), 20 + u64::from(pick.coded)), 0, &mut events);
    }
    assert_eq!(repeated, [1, 0, 3], "in the order of reports, but for what has arrived");
    assert!(sender.is_recovering());
}

#[test]
fn a_stream_without_its_end_cannot_be_confirmed() {
    let mut events = Events::default();
    let mut sender = Sender::new(256, 4, 1);
    let reliability = Reliability::SelectiveRepeat;
    let request =
        StreamRequest { length: 1000, reliability, immediate: None, priority: 0, user_data: 0 };
    sender.post_stream(request).unwrap();
    let part = StreamPart { offset: 0, remote_offset: 0, length: 256 };
    sender.continue_stream(0, part).unwrap();
    sender.credit_received(0, [1000].into_iter());
    sender.advance(0, &mut events);
    let pick = sender.pick(0, |_, _| Some(1)).unwrap();
    sender.sent(pick, (PathId(0), 0), 0, &mut events);
    sender.slice_received(0, (ENDED, 0, &[]), 0, &mut events);
    sender.completed_end_received(1, 0, &mut events);
    assert_eq!(events.pop(), None);
    sender.end_stream(0, 0, &mut events).unwrap();
    sender.slice_received(0, (ENDED, 0, &[]), 0, &mut events);
    assert!(events.pop().is_some());
}
