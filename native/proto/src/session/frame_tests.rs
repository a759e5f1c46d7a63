//! Control frames: round trips, truncation, flipped bytes, and malformed frames.

use super::*;
use proptest::prelude::*;

const MESSAGES: u64 = 1 << 48;
const PATHS: u8 = 4;

fn reasons() -> impl Strategy<Value = AbortReason> {
    use AbortReason::{Cancelled, Completed, TooLong};
    prop_oneof![Just(TooLong), Just(Cancelled), Just(Completed)]
}

/// Encoded frames, generated from fields because `Frame` borrows its data.
fn encoded() -> impl Strategy<Value = Vec<u8>> {
    let write = |frame: Frame<'_>| {
        let mut out = Vec::new();
        frame.encode(&mut out);
        out
    };
    let bytes = proptest::collection::vec(any::<u8>(), 0..40);
    let lengths = proptest::collection::vec(0_u64..1 << 40, 0..9);
    prop_oneof![
        (0..MESSAGES, 0..MESSAGES).prop_map(move |(completed_end, credit_end)| write(Frame::Ack {
            completed_end,
            credit_end
        })),
        (0..MESSAGES, any::<u32>(), 0_u32..1 << 29, bytes).prop_map(
            move |(message, cumulative, start, bitmap)| write(Frame::Slice {
                message,
                cumulative,
                start: start * 8,
                bitmap: &bitmap
            })
        ),
        (0..MESSAGES, lengths).prop_map(move |(start, lengths)| {
            let mut packed = Vec::new();
            for length in &lengths {
                push_credit_length(&mut packed, *length);
            }
            assert!(credit_lengths(&packed).eq(lengths));
            write(Frame::Credit { start, lengths: &packed })
        }),
        (0..MESSAGES, reasons())
            .prop_map(move |(message, reason)| write(Frame::AbortSend { message, reason })),
        (0..MESSAGES, reasons())
            .prop_map(move |(message, reason)| write(Frame::AbortReceive { message, reason })),
        (0..MESSAGES, any::<u32>(), 0_u64..1 << 40, proptest::option::of(any::<u32>())).prop_map(
            move |(message, units, length, immediate)| write(Frame::StreamEnd {
                message,
                units,
                length,
                immediate
            })
        ),
        Just(write(Frame::Ping)),
        proptest::collection::btree_set(0_u64..1000, 0..9).prop_map(move |starts| {
            let mut runs = Vec::new();
            for start in &starts {
                push_lost_run(&mut runs, (start * 10, 9));
            }
            assert!(lost_runs(&runs).eq(starts.iter().map(|at| (at * 10, at * 10 + 9))));
            write(Frame::Losses { path: PathId(3), runs: &runs })
        }),
        proptest::array::uniform5(0..MESSAGES).prop_map(
            move |[lost, runs, found, duplicates, dropped]| write(Frame::LossCounts {
                path: PathId(2),
                counts: LossCounts { lost, runs, found, duplicates, dropped }
            })
        ),
        any::<u64>().prop_map(move |token| write(Frame::PathChallenge { token })),
        any::<u64>().prop_map(move |token| write(Frame::PathResponse { token })),
        (0..PATHS, any::<u64>(), any::<u32>(), proptest::array::uniform4(0_u64..1 << 40)).prop_map(
            move |(path, newest, age_nanos, [ect0, ect1, ce, rest])| {
                let received = ect0 + ect1 + ce + rest;
                let counts = PathCounts { received, ect0, ect1, ce };
                write(Frame::PathCounts { path: PathId(path), newest, age_nanos, counts })
            }
        ),
        any::<u16>().prop_map(move |unit_bytes| write(Frame::Unit { unit_bytes })),
        any::<(bool, u32)>().prop_map(move |(is_answer, delay_nanos)| write(Frame::AckCadence {
            is_answer,
            delay_nanos
        })),
        any::<bool>().prop_map(move |is_done| write(Frame::Draining { is_done })),
        any::<u8>().prop_map(move |code| write(Frame::Close { code })),
    ]
}

proptest! {
    #[test]
    fn frames_round_trip_and_every_truncation_is_refused(bytes in encoded()) {
        let frames: Result<Vec<_>, _> = Frames::new(&bytes, Version::V6, PATHS).collect();
        let frames = frames.unwrap();
        prop_assert_eq!(frames.len(), 1);
        let mut again = Vec::new();
        frames[0].encode(&mut again);
        prop_assert_eq!(&again, &bytes);
        for length in 1..bytes.len() {
            prop_assert_eq!(Frames::new(&bytes[..length], Version::V6, PATHS).validate(), Err(Malformed));
        }
    }

    #[test]
    fn a_flipped_byte_never_reads_as_the_same_frame(
        bytes in encoded(), at: prop::sample::Index, flip in 1_u8..,
    ) {
        let mut flipped = bytes.clone();
        let at = at.index(bytes.len());
        flipped[at] ^= flip;
        let original: Vec<_> = Frames::new(&bytes, Version::V6, PATHS).collect();
        prop_assert_ne!(Frames::new(&flipped, Version::V6, PATHS).collect::<Vec<_>>(), original);
    }

    #[test]
    fn sequences_and_padding_are_read_in_order(
        list in proptest::collection::vec(encoded(), 0..6), padding in 0_usize..9,
    ) {
        let mut packet = Vec::new();
        for bytes in &list {
            packet.extend(std::iter::repeat_n(0, padding));
            packet.extend_from_slice(bytes);
        }
        packet.extend(std::iter::repeat_n(0, padding));
        prop_assert_eq!(Frames::new(&packet, Version::V6, PATHS).validate(), Ok(()));
        prop_assert_eq!(Frames::new(&packet, Version::V6, PATHS).count(), list.len());
    }

    #[test]
    fn no_bytes_make_the_parser_panic(bytes: Vec<u8>) {
        let frames = Frames::new(&bytes, Version::V6, PATHS);
        prop_assert!(frames.clone().count() <= bytes.len());
        let _ = frames.validate();
    }
}

#[test]
fn frames_about_a_path_that_is_none_are_malformed() {
    let path = PathId(PATHS);
    for frame in [
        Frame::PathCounts { path, newest: 0, age_nanos: 0, counts: PathCounts::default() },
        Frame::Losses { path, runs: &[] },
        Frame::LossCounts { path, counts: LossCounts::default() },
    ] {
        let mut out = Vec::new();
        frame.encode(&mut out);
        assert_eq!(Frames::new(&out, Version::V6, PATHS).validate(), Err(Malformed), "{frame:?}");
        assert_eq!(Frames::new(&out, Version::V6, PATHS + 1).validate(), Ok(()));
    }
}

#[test]
fn version_5_has_no_cadence_and_version_6_has_two_kinds_of_it() {
    for kind in 0..4 {
        let frames = [18, kind, 0, 0, 1, 0];
        let read = |version| Frames::new(&frames, version, PATHS).validate();
        assert_eq!(read(Version::V5), Err(Malformed));
        assert_eq!(read(Version::V6), if kind < 2 { Ok(()) } else { Err(Malformed) });
    }
}

#[test]
fn runs_that_do_not_rise_are_malformed() {
    let frame = |list: &[(u64, u32)]| {
        let mut runs = Vec::new();
        for run in list {
            push_lost_run(&mut runs, *run);
        }
        let mut out = Vec::new();
        Frame::Losses { path: PathId(0), runs: &runs }.encode(&mut out);
        Frames::new(&out, Version::V6, PATHS).validate()
    };
    assert_eq!(frame(&[(1, 2), (4, 1), (6, 1)]), Ok(()));
    for list in [&[(5, 0)][..], &[(1, 2), (3, 1)], &[(4, 1), (1, 1)], &[(u64::MAX, 9)]] {
        let is_malformed = frame(list) == Err(Malformed);
        assert!(is_malformed, "{list:?}");
    }
}
