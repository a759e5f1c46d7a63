//! Lists of operations: regardless of what the user and the network do, every completed message is
//! correct, and once the network behaves, everything that can complete does so exactly once.

use proptest::prelude::*;
use sealane_proto::session::{
    CompletionStatus, Event, Reliability, SendRequest, StreamPart, StreamRequest,
};

use crate::pair::{MILLISECOND, Pair, UNIT, receive, send};

const SLOTS: u16 = 4;
/// Room for one message per slot.
const STRIDE: u64 = 8192;

#[derive(Debug, Clone, Copy)]
enum Operation {
    Send {
        length: u64,
        k: u8,
    },
    Receive {
        length_max: u64,
    },
    /// A stream of two thirds of a buffer, in two overlapping parts.
    Stream {
        length: u64,
    },
    /// Cancel the newest send, or complete the newest receive.
    Cancel,
    Complete,
    /// Let time pass, in microseconds, and let both ends send.
    Wait(u64),
    /// Deliver, lose, repeat or corrupt one of the datagrams in flight to an end.
    Deliver(usize, prop::sample::Index),
    Lose(usize, prop::sample::Index),
    Repeat(usize, prop::sample::Index),
    Spoil(usize, prop::sample::Index, usize),
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let at = any::<prop::sample::Index>;
    let one = prop_oneof![
        2 => (0_u64..5000, 0_u8..6).prop_map(|(length, k)| Operation::Send { length, k }),
        2 => (2000_u64..6000).prop_map(|length_max| Operation::Receive { length_max }),
        1 => (1_u64..5000).prop_map(|length| Operation::Stream { length }),
        1 => any::<bool>()
            .prop_map(|sends| if sends { Operation::Cancel } else { Operation::Complete }),
        4 => (0_u64..30_000).prop_map(Operation::Wait),
        12 => (0_usize..2, at()).prop_map(|(end, at)| Operation::Deliver(end, at)),
        2 => (0_usize..2, at()).prop_map(|(end, at)| Operation::Lose(end, at)),
        1 => (0_usize..2, at()).prop_map(|(end, at)| Operation::Repeat(end, at)),
        1 => (0_usize..2, at(), any::<usize>())
            .prop_map(|(end, at, bit)| Operation::Spoil(end, at, bit)),
    ];
    proptest::collection::vec(one, 0..120)
}

/// Requests by message number: length, and whether it was cancelled or completed early.
#[derive(Default)]
struct Asked {
    sends: Vec<(u64, bool)>,
    receives: Vec<(u64, bool)>,
}

fn apply(pair: &mut Pair, asked: &mut Asked, operation: Operation) {
    let take = |pair: &mut Pair, end: usize, at: prop::sample::Index| {
        let queue = &mut pair.under_way[end];
        (!queue.is_empty()).then(|| at.index(queue.len()))
    };
    match operation {
        Operation::Send { length, k } => {
            let offset = asked.sends.len() as u64 % u64::from(SLOTS) * STRIDE;
            let reliability = match k {
                0 => Reliability::SelectiveRepeat,
                k => Reliability::ErasureCoded { k, m: 2, depth: k % 4 + 1 },
            };
            let priority = (length % 4) as u8;
            let request = SendRequest { reliability, priority, ..send(offset, length) };
            if pair.ends[0].post_send(request, pair.now).is_ok() {
                asked.sends.push((length, false));
            }
        }
        Operation::Stream { length } => stream(pair, asked, length),
        Operation::Cancel => {
            let newest = asked.sends.len() as u64;
            if let Some((_, is_given_up)) = asked.sends.last_mut() {
                *is_given_up |= pair.ends[0].cancel_send(newest - 1, pair.now).is_ok();
            }
        }
        Operation::Complete => {
            let newest = asked.receives.len() as u64;
            if let Some((_, is_given_up)) = asked.receives.last_mut() {
                *is_given_up |= pair.ends[1].complete_receive(newest - 1, pair.now).is_ok();
            }
        }
        Operation::Receive { length_max } => {
            let offset = asked.receives.len() as u64 % u64::from(SLOTS) * STRIDE;
            if pair.ends[1].post_receive(receive(offset, length_max), pair.now).is_ok() {
                asked.receives.push((length_max, false));
            }
        }
        Operation::Wait(micros) => {
            pair.now += micros * 1000;
            pair.pump();
        }
        Operation::Deliver(end, at) => {
            if let Some(at) = take(pair, end, at) {
                let datagram = pair.under_way[end].remove(at);
                pair.deliver(end, datagram);
                pair.pump();
            }
        }
        Operation::Lose(end, at) => {
            if let Some(at) = take(pair, end, at) {
                pair.under_way[end].remove(at);
            }
        }
        Operation::Repeat(end, at) => {
            if let Some(at) = take(pair, end, at) {
                let datagram = pair.under_way[end][at].clone();
                pair.deliver(end, datagram);
                pair.pump();
            }
        }
        Operation::Spoil(end, at, bit) => {
            if let Some(at) = take(pair, end, at) {
                let mut datagram = pair.under_way[end][at].clone();
                let bit = bit % (datagram.len() * 8);
                datagram[bit / 8] ^= 1 << (bit % 8);
                let before = pair.memory[end].clone();
                pair.deliver(end, datagram);
                assert_eq!(pair.memory[end], before);
            }
        }
    }
}

/// Announces all of a message: first its second half, then all of it.
fn stream(pair: &mut Pair, asked: &mut Asked, length: u64) {
    let offset = asked.sends.len() as u64 % u64::from(SLOTS) * STRIDE;
    let reliability = Reliability::SelectiveRepeat;
    let request = StreamRequest { length, reliability, immediate: None, priority: 0, user_data: 0 };
    let Ok(message) = pair.ends[0].post_stream(request, pair.now) else { return };
    asked.sends.push((length, false));
    let half = (length / 2).next_multiple_of(UNIT).min(length - 1) / UNIT * UNIT;
    for start in [half, 0] {
        let part =
            StreamPart { offset: offset + start, remote_offset: start, length: length - start };
        if pair.ends[0].continue_stream(message, part, pair.now).is_err() {
            // Its receive is known to be too short, so it has ended.
            assert_eq!(start, half);
            return;
        }
    }
    pair.ends[0].end_stream(message, pair.now).unwrap();
}

/// Checks the payload of receives that just completed, and returns their statuses.
fn completed(pair: &mut Pair, end: usize, seen: &mut [Option<CompletionStatus>]) {
    for event in std::mem::take(&mut pair.events[end]) {
        match event {
            Event::SendCompleted { message, status, .. } => {
                let slot = &mut seen[message as usize];
                assert_eq!(*slot, None, "send {message} completed twice");
                *slot = Some(status);
            }
            Event::ReceiveCompleted { message, status, length, .. } => {
                let slot = &mut seen[message as usize];
                assert_eq!(*slot, None, "receive {message} completed twice");
                *slot = Some(status);
                // The landed part of an aborted message shows in its chunks, not in its length.
                let length = if status == CompletionStatus::Ok { length } else { 0 };
                let start = (message % u64::from(SLOTS) * STRIDE) as usize;
                let range = start..start + length as usize;
                assert_eq!(pair.memory[1].bytes[range.clone()], pair.memory[0].bytes[range]);
            }
            Event::Established { .. } | Event::Draining => {}
            Event::Closed { .. } => panic!("the session closed"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn what_completes_is_right_and_everything_completes(operations in operations()) {
        let mut pair = Pair::established(SLOTS);
        let mut asked = Asked::default();
        let mut seen = [vec![None; operations.len()], vec![None; operations.len()]];
        for operation in operations {
            apply(&mut pair, &mut asked, operation);
            completed(&mut pair, 0, &mut seen[0]);
            completed(&mut pair, 1, &mut seen[1]);
        }
        pair.run(5000 * MILLISECOND);
        completed(&mut pair, 0, &mut seen[0]);
        completed(&mut pair, 1, &mut seen[1]);
        for (message, (send, receive)) in asked.sends.iter().zip(&asked.receives).enumerate() {
            let fits = send.0 <= receive.0;
            let expected = if fits { CompletionStatus::Ok } else { CompletionStatus::TooLong };
            let statuses = [seen[0][message], seen[1][message]];
            if !send.1 && !receive.1 {
                prop_assert_eq!(statuses, [Some(expected); 2]);
                continue;
            }
            // Whichever end aborts or finishes first decides; both ends complete.
            let [sent, received] = statuses.map(|status| status.expect("it completes"));
            prop_assert_eq!(sent == CompletionStatus::Cancelled, send.1);
            prop_assert_eq!(received == CompletionStatus::Partial, receive.1);
            prop_assert!(sent != CompletionStatus::Partial || receive.1);
            prop_assert!(received != CompletionStatus::Cancelled || send.1);
        }
        // Beyond that, only aborted messages have completed.
        let matched = asked.sends.len().min(asked.receives.len());
        for (seen, asked) in seen.iter().zip([&asked.sends, &asked.receives]) {
            for (status, (_, is_given_up)) in seen.iter().zip(asked).skip(matched) {
                prop_assert_eq!(status.is_some(), *is_given_up);
            }
            prop_assert!(seen[asked.len()..].iter().all(Option::is_none));
        }
    }
}
