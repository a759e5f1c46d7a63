//! The PDU codec and the reader.

use super::super::reader::{PduReader, Piece};
use super::*;
use proptest::prelude::*;

fn limits() -> PduLimits {
    PduLimits { capsule_data_max: 64, data_max: 64, digests: Digests::default() }
}

fn data_pdu(kind_of: u8, flags: u8, data: &[u8]) -> Vec<u8> {
    let header = DataHeader {
        common: CommonHeader::new(kind_of, flags, data.len(), Digests::default()),
        cid: 7.into(),
        tag: 9.into(),
        offset: 4096.into(),
        length: (data.len() as u32).into(),
        reserved: [0; 4],
    };
    [header.as_bytes(), data].concat()
}

fn stream() -> Vec<u8> {
    let command = CapsuleCmd {
        common: CommonHeader::new(kind::CAPSULE_CMD, 0, 3, Digests::default()),
        entry: SubmissionEntry { opcode: 1, ..SubmissionEntry::default() },
    };
    let response = CapsuleResp {
        common: CommonHeader::new(kind::CAPSULE_RESP, 0, 0, Digests::default()),
        entry: CompletionEntry::default(),
    };
    [
        command.as_bytes(),
        b"abc",
        &data_pdu(kind::H2C_DATA, FLAG_LAST, b"host data"),
        &data_pdu(kind::C2H_DATA, FLAG_LAST | FLAG_SUCCESS, b"controller data"),
        response.as_bytes(),
        &termination(true, PduError::field(3, "x"), &[]),
    ]
    .concat()
}

fn read_all(bytes: &[u8], cuts: &[usize]) -> Result<(Vec<Header>, Vec<u8>), PduError> {
    let mut reader = PduReader::new(limits());
    let (mut headers, mut data) = (Vec::new(), Vec::new());
    let mut start = 0;
    for &cut in cuts.iter().chain([&bytes.len()]) {
        let mut input = &bytes[start..cut.max(start)];
        start = cut.max(start);
        while let Some(piece) = reader.next(&mut input)? {
            match piece {
                Piece::Header(header, _) => headers.push(header),
                Piece::Data(bytes) => data.extend_from_slice(bytes),
                Piece::End(is_intact) => assert!(is_intact),
            }
        }
    }
    Ok((headers, data))
}

proptest! {
    #[test]
    fn any_split_of_the_stream_reads_the_same(
        cuts in proptest::collection::vec(0usize..300, 0..20),
    ) {
        let bytes = stream();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
        cuts.sort_unstable();
        let (headers, data) = read_all(&bytes, &cuts).unwrap();
        prop_assert_eq!(headers.len(), 5);
        prop_assert_eq!(data, b"abchost datacontroller data".to_vec());
    }

    #[test]
    fn arbitrary_bytes_never_panic_and_never_exceed_the_limit(
        bytes in proptest::collection::vec(any::<u8>(), 0..400),
    ) {
        let mut reader = PduReader::new(limits());
        let mut input = &bytes[..];
        while let Ok(Some(piece)) = reader.next(&mut input) {
            if let Piece::Header(_, data) = piece {
                prop_assert!(data <= TERMINATION_DATA_MAX);
            }
        }
    }
}

#[test]
fn every_bit_flip_of_a_common_header_is_refused_or_gives_another_valid_pdu() {
    let bytes = data_pdu(kind::C2H_DATA, FLAG_LAST, b"0123456789");
    for bit in 0..64 {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        if let Ok((headers, data)) = read_all(&flipped, &[]) {
            for header in headers {
                if let Header::HostData(h) | Header::ControllerData(h) = header {
                    assert_eq!(h.length.get() as usize, data.len(), "bit {bit}");
                }
            }
        }
    }
}

#[test]
fn every_truncation_waits_for_more() {
    let bytes = data_pdu(kind::H2C_DATA, 0, b"0123456789");
    for length in 0..24 {
        let (headers, data) = read_all(&bytes[..length], &[]).unwrap();
        assert!(headers.is_empty() && data.is_empty());
    }
}

#[test]
fn lengths_that_contradict_each_other_are_refused() {
    let good = data_pdu(kind::H2C_DATA, 0, b"0123456789");
    for (offset, value) in [(2, 23), (3, 25), (4, 23), (4, 90), (5, 1), (16, 11), (1, 1)] {
        let mut bad = good.clone();
        bad[offset] = value;
        assert!(read_all(&bad, &[]).is_err(), "byte {offset} = {value}");
    }
}

#[test]
fn digests_are_crc32c() {
    // RFC 3720 appendix B.4, and the polynomial's usual check value.
    let ascending: Vec<u8> = (0..32).collect();
    let descending: Vec<u8> = (0..32).rev().collect();
    for (bytes, expected) in [
        (&[0; 32][..], 0x8a91_36aa),
        (&[0xff; 32], 0x62a8_ab43),
        (&ascending, 0x46dd_794e),
        (&descending, 0x113f_db5c),
        (b"123456789", 0xe306_9283),
    ] {
        assert_eq!(digest(bytes), expected);
    }
}

#[test]
fn digests_are_placed_as_specified() {
    for (header, data) in [(false, false), (true, false), (false, true), (true, true)] {
        let digests = Digests { header, data };
        assert_eq!(Digests::from_field(digests.field()), digests);
        let with_data = CommonHeader::new(kind::CAPSULE_CMD, 0, 100, digests);
        let (head, tail) = (72 + 4 * usize::from(header), 4 * usize::from(data));
        assert_eq!(usize::from(with_data.data_offset), head);
        assert_eq!(with_data.pdu_bytes.get() as usize, head + 100 + tail);
        let limits = PduLimits { capsule_data_max: 100, data_max: 0, digests };
        let layout = with_data.check(&limits).unwrap();
        assert_eq!((layout.bytes_before_data(), layout.bytes_of_data()), (head, 100 + tail));
        // Digests that differ from the negotiated ones are refused, whether more or fewer.
        for other in [(false, false), (true, false), (false, true), (true, true)] {
            let digests = Digests { header: other.0, data: other.1 };
            let is_right = other == (header, data);
            let bare = CommonHeader::new(kind::R2T, 0, 0, digests);
            assert_eq!(bare.check(&limits).is_ok(), other.0 == header);
            let with_data = CommonHeader::new(kind::CAPSULE_CMD, 0, 50, digests);
            assert_eq!(with_data.check(&limits).is_ok(), is_right);
            // Handshake PDUs never have digests.
            let handshake = CommonHeader::new(kind::IC_REQ, 0, 0, digests);
            assert_eq!((handshake.flags, handshake.pdu_bytes.get()), (0, 128));
            assert!(handshake.check(&limits).is_ok());
        }
    }
    // A digest alone isn't data.
    let digests = Digests { header: false, data: true };
    let limits = PduLimits { capsule_data_max: 100, data_max: 0, digests };
    for bytes in 73..=76u32 {
        let common = CommonHeader {
            flags: FLAG_DATA_DIGEST,
            data_offset: 72,
            pdu_bytes: bytes.into(),
            ..CommonHeader::new(kind::CAPSULE_CMD, 0, 0, digests)
        };
        let error = common.check(&limits).unwrap_err();
        assert_eq!((error.code, error.offset), (1, 4));
    }
}
