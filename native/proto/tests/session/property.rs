//! Lists of operations: whatever the user and the network do, what completes is right, and once the
//! network behaves, everything that can complete does, once.

use proptest::prelude::*;
use sealane_proto::session::{CompletionStatus, Event, Reliability, SendRequest};

use crate::pair::{MILLISECOND, Pair, receive, send};

const SLOTS: u16 = 4;
/// Room for one message of each slot.
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
    /// Let time pass, in microseconds, and let both ends send.
    Wait(u64),
    /// Deliver, lose, repeat or spoil one of the datagrams under way to an end.
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
        4 => (0_u64..30_000).prop_map(Operation::Wait),
        12 => (0_usize..2, at()).prop_map(|(end, at)| Operation::Deliver(end, at)),
        2 => (0_usize..2, at()).prop_map(|(end, at)| Operation::Lose(end, at)),
        1 => (0_usize..2, at()).prop_map(|(end, at)| Operation::Repeat(end, at)),
        1 => (0_usize..2, at(), any::<usize>())
            .prop_map(|(end, at, bit)| Operation::Spoil(end, at, bit)),
    ];
    proptest::collection::vec(one, 0..120)
}

/// What was asked for, by message number.
#[derive(Default)]
struct Asked {
    sends: Vec<u64>,
    receives: Vec<u64>,
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
            let request = SendRequest { reliability, ..send(offset, length) };
            if pair.ends[0].post_send(request, pair.now).is_ok() {
                asked.sends.push(length);
            }
        }
        Operation::Receive { length_max } => {
            let offset = asked.receives.len() as u64 % u64::from(SLOTS) * STRIDE;
            if pair.ends[1].post_receive(receive(offset, length_max), pair.now).is_ok() {
                asked.receives.push(length_max);
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
                let start = (message % u64::from(SLOTS) * STRIDE) as usize;
                let range = start..start + length as usize;
                assert_eq!(pair.memory[1].bytes[range.clone()], pair.memory[0].bytes[range]);
            }
            Event::Established { .. } => {}
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
        for (message, (length, length_max)) in asked.sends.iter().zip(&asked.receives).enumerate() {
            let fits = length <= length_max;
            let expected = if fits { CompletionStatus::Ok } else { CompletionStatus::TooLong };
            prop_assert_eq!(seen[0][message], Some(expected));
            prop_assert_eq!(seen[1][message], Some(expected));
        }
        let matched = asked.sends.len().min(asked.receives.len());
        prop_assert!(seen.iter().all(|seen| seen[matched..].iter().all(Option::is_none)));
    }
}
