//! Reed–Solomon code over equal, even-sized symbols: any k of k + m are enough (MDS).
//!
//! A thin face over `reed-solomon-simd` (Leopard, GF(2^16)): it adds types for what can go wrong and
//! keeps the working memory between calls.

use reed_solomon_simd::{Error, ReedSolomonDecoder, ReedSolomonEncoder};

/// Why symbols could not be coded. Every case is a caller's mistake: the code itself cannot fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ErasureError {
    /// k or m is 0, or the symbol size is 0 or odd, or the data is not k symbols.
    #[error("invalid shape of an erasure code")]
    Shape,
    /// An index is out of range or came twice.
    #[error("symbol index out of range or given twice")]
    Index,
    /// Fewer than k symbols.
    #[error("too few symbols to decode")]
    TooFew,
}

impl From<Error> for ErasureError {
    fn from(error: Error) -> Self {
        match error {
            Error::NotEnoughShards { .. } | Error::TooFewOriginalShards { .. } => Self::TooFew,
            Error::DuplicateOriginalShardIndex { .. }
            | Error::DuplicateRecoveryShardIndex { .. }
            | Error::InvalidOriginalShardIndex { .. }
            | Error::InvalidRecoveryShardIndex { .. } => Self::Index,
            _ => Self::Shape,
        }
    }
}

/// Computes parity.
#[derive(Default)]
pub struct Encoder(Option<ReedSolomonEncoder>);

impl Encoder {
    /// Replaces `parity` by the `m` parity symbols, one behind the other, of `data`: whole symbols
    /// of `symbol_bytes` (even) each.
    pub fn encode(
        &mut self,
        data: &[u8],
        symbol_bytes: usize,
        m: u8,
        parity: &mut Vec<u8>,
    ) -> Result<(), ErasureError> {
        if symbol_bytes == 0 || !data.len().is_multiple_of(symbol_bytes) {
            return Err(ErasureError::Shape);
        }
        let k = data.len() / symbol_bytes;
        let encoder = match &mut self.0 {
            Some(encoder) => {
                encoder.reset(k, usize::from(m), symbol_bytes)?;
                encoder
            }
            none => none.insert(ReedSolomonEncoder::new(k, usize::from(m), symbol_bytes)?),
        };
        for symbol in data.chunks_exact(symbol_bytes) {
            encoder.add_original_shard(symbol)?;
        }
        parity.clear();
        for symbol in encoder.encode()?.recovery_iter() {
            parity.extend_from_slice(symbol);
        }
        Ok(())
    }
}

/// Computes missing data.
#[derive(Default)]
pub struct Decoder(Option<ReedSolomonDecoder>);

impl Decoder {
    /// Hands every data symbol that is not among `data` to `restored`, with its index.
    /// `data` and `parity` are the symbols at hand, with their indices.
    pub fn decode<'a>(
        &mut self,
        (k, m, symbol_bytes): (usize, u8, usize),
        data: impl Iterator<Item = (usize, &'a [u8])>,
        parity: impl Iterator<Item = (usize, &'a [u8])>,
        mut restored: impl FnMut(usize, &[u8]),
    ) -> Result<(), ErasureError> {
        let decoder = match &mut self.0 {
            Some(decoder) => {
                decoder.reset(k, usize::from(m), symbol_bytes)?;
                decoder
            }
            none => none.insert(ReedSolomonDecoder::new(k, usize::from(m), symbol_bytes)?),
        };
        for (index, symbol) in data {
            decoder.add_original_shard(index, symbol)?;
        }
        for (index, symbol) in parity {
            decoder.add_recovery_shard(index, symbol)?;
        }
        for (index, symbol) in decoder.decode()?.restored_original_iter() {
            restored(index, symbol);
        }
        Ok(())
    }
}

impl core::fmt::Debug for Encoder {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("Encoder")
    }
}

impl core::fmt::Debug for Decoder {
    fn fmt(&self, formatter: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        formatter.write_str("Decoder")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn symbols(count: usize, bytes: usize, seed: u8) -> Vec<u8> {
        let byte = |i: usize| (i as u8).wrapping_mul(167) ^ (i >> 8) as u8 ^ seed;
        (0..count * bytes).map(byte).collect()
    }

    /// Decodes from the symbols whose bit is set in `have` (data first); the data, if decodable.
    fn decode(
        have: &[bool],
        (k, m, bytes): (usize, u8, usize),
        data: &[u8],
        parity: &[u8],
    ) -> Result<Vec<u8>, ErasureError> {
        let mut out = vec![0; data.len()];
        let present = data.chunks_exact(bytes).enumerate().filter(|(i, _)| have[*i]);
        for (i, symbol) in present.clone() {
            out[i * bytes..(i + 1) * bytes].copy_from_slice(symbol);
        }
        let recovery = parity.chunks_exact(bytes).enumerate().filter(|(i, _)| have[k + *i]);
        let shape = (k, m, bytes);
        Decoder::default().decode(shape, present, recovery, |i, symbol| {
            out[i * bytes..(i + 1) * bytes].copy_from_slice(symbol);
        })?;
        Ok(out)
    }

    #[test]
    fn four_plus_two_decodes_exactly_when_four_arrive() {
        let data = symbols(4, 96, 3);
        let mut parity = Vec::new();
        Encoder::default().encode(&data, 96, 2, &mut parity).unwrap();
        for pattern in 0..64_u32 {
            let have: Vec<bool> = (0..6).map(|bit| pattern >> bit & 1 == 1).collect();
            let decoded = decode(&have, (4, 2, 96), &data, &parity);
            if pattern.count_ones() >= 4 {
                assert_eq!(decoded.as_deref(), Ok(&data[..]), "pattern {pattern:06b}");
            } else {
                assert_eq!(decoded, Err(ErasureError::TooFew), "pattern {pattern:06b}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_k_symbols_are_enough(
            k in 1_usize..40, m in 1_u8..16, half in 1_usize..60, seed: u8,
            order in proptest::collection::vec(any::<u32>(), 56),
        ) {
            let data = symbols(k, half * 2, seed);
            let mut parity = Vec::new();
            Encoder::default().encode(&data, half * 2, m, &mut parity).unwrap();
            let total = k + usize::from(m);
            let mut ranked: Vec<usize> = (0..total).collect();
            ranked.sort_by_key(|i| order[*i]);
            let mut have = vec![false; total];
            ranked.iter().take(k).for_each(|i| have[*i] = true);
            prop_assert_eq!(decode(&have, (k, m, half * 2), &data, &parity), Ok(data.clone()));
        }
    }

    #[test]
    fn bad_shapes_are_refused_and_leave_the_coder_usable() {
        let mut encoder = Encoder::default();
        let mut parity = Vec::new();
        assert_eq!(encoder.encode(&[0; 6], 3, 1, &mut parity), Err(ErasureError::Shape));
        assert_eq!(encoder.encode(&[0; 6], 4, 1, &mut parity), Err(ErasureError::Shape));
        assert_eq!(encoder.encode(&[0; 6], 0, 1, &mut parity), Err(ErasureError::Shape));
        assert_eq!(encoder.encode(&[0; 6], 2, 0, &mut parity), Err(ErasureError::Shape));
        assert_eq!(encoder.encode(&[], 2, 1, &mut parity), Err(ErasureError::Shape));
        assert_eq!(encoder.encode(&[1; 6], 2, 3, &mut parity), Ok(()));
        assert_eq!(parity.len(), 6);
    }
}
